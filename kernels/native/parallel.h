// Runs chunks of work on threads.

#ifndef DAF_PARALLEL_H
#define DAF_PARALLEL_H

#include <cstdint>

namespace daf {

// Calls body(context, chunk) once for every chunk in [0, chunks), on up to `threads` threads.
//
// The threads are those of the OpenMP runtime that the process has loaded, where there is one:
// torch's idle workers spin for a while after every parallel region, and threads of our own
// would have to fight them for the cores. Else they are started for the call. In a forked child,
// where an OpenMP pool inherited from the parent would hang, the caller does all the work.
void parallel_for(int threads, int64_t chunks, void (*body)(void*, int64_t), void* context);

const char* threading();

}  // namespace daf

#endif
