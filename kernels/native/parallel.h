// Runs chunks of work on threads.

#ifndef DAF_PARALLEL_H
#define DAF_PARALLEL_H

#include <cstdint>

namespace daf {

// Calls body(context, chunk) once for every chunk in [0, chunks), on up to `threads` threads.
//
// The caller takes chunks too, and waits only for helpers that have begun one. So a call never
// takes much longer than on one thread, even where all cores are busy: with torch's OpenMP
// workers, say, which spin for a while after every parallel region. The caller does all the work
// when another thread has the helpers, and in a forked child, where there are none.
void parallel_for(int threads, int64_t chunks, void (*body)(void*, int64_t), void* context);

}  // namespace daf

#endif
