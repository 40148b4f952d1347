// The CUDA kernels on a CPU: kernels/cuda/kernels.cu as it is, under as much of the language and
// of the driver's API as they and kernels/cuda_driver.py need. For tests.
//
// Blocks run one after another; the threads of a block are fibers, which take turns from one place
// where they wait for each other to the next. Each warp goes as far ahead of the others as it can,
// so that missing barriers show, and every other launch runs blocks, warps and threads in reverse.
// A launch fails when threads wait for each other in vain or at different places, or when a block
// writes past its shared memory.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

namespace emulation {

constexpr int MAX_THREADS = 256, WARP = 32;  // of a block; the kernels' __launch_bounds__
constexpr size_t STACK_BYTES = 1 << 16;
constexpr size_t MAX_SHARED_BYTES = 48 << 10;
constexpr unsigned char POISON = 0xa5;

struct Dim {
  unsigned x, y, z;
};

struct Barrier {
  int arrived = 0, line = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  unsigned values[2][WARP];  // by the parity of the barrier's generation
};

struct Fiber {
  ucontext_t context;
  bool done;
};

Dim thread_index, block_index, block_size, grid_size;
ucontext_t scheduler;
Fiber fibers[MAX_THREADS];
std::unique_ptr<char[]> stacks(new char[MAX_THREADS * STACK_BYTES]);
Warp warps[MAX_THREADS / WARP];
Barrier block_barrier;
bool progress, fault;

void yield() {
  const Dim index = thread_index;
  swapcontext(&fibers[index.x].context, &scheduler);
  thread_index = index;
}

void arrive(Barrier& barrier, int expected, int line) {
  if (barrier.arrived && barrier.line != line) fault = true;
  barrier.line = line;
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    progress = true;
  }
  while (barrier.generation == generation) yield();
}

template <class Value>
Value shuffle(unsigned mask, Value value, int source, int line) {
  static_assert(sizeof(Value) == sizeof(unsigned), "4 bytes");
  if (mask != ~0u) fault = true;
  Warp& warp = warps[thread_index.x / WARP];
  unsigned* values = warp.values[warp.barrier.generation & 1];
  std::memcpy(&values[thread_index.x % WARP], &value, sizeof value);
  arrive(warp.barrier, WARP, line);
  std::memcpy(&value, &values[source], sizeof value);
  return value;
}

template <class To, class From>
To reinterpret(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "the same size");
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace emulation

#define __global__
#define __device__
#define __shared__
#define __launch_bounds__(threads)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size

#define __float_as_uint(value) emulation::reinterpret<unsigned>(static_cast<float>(value))
#define __uint_as_float(bits) emulation::reinterpret<float>(static_cast<unsigned>(bits))
#define __fsqrt_rn(value) std::sqrt(value)
#define __syncthreads() \
  emulation::arrive(emulation::block_barrier, static_cast<int>(blockDim.x), __LINE__)
#define __shfl_sync(mask, value, source) emulation::shuffle(mask, value, source, __LINE__)
#define __shfl_xor_sync(mask, value, other) \
  emulation::shuffle(mask, value, static_cast<int>(threadIdx.x % 32) ^ (other), __LINE__)

inline void atomicMax(unsigned* at, unsigned value) { *at = value > *at ? value : *at; }
inline void atomicOr(unsigned* at, unsigned value) { *at |= value; }

unsigned char scratch[emulation::MAX_SHARED_BYTES] __align__(16);

#include "kernels.cu"

namespace emulation {

typedef void (*Kernel)(const Job);

Kernel kernel;
const Job* argument;

void start() {
  kernel(*argument);
  fibers[thread_index.x].done = progress = true;
}

// Gives each thread of a warp a turn; whether any is left.
bool run_warp(int warp, bool backwards) {
  const int first = warp * WARP;
  const int count = std::min(WARP, static_cast<int>(block_size.x) - first);
  bool left = false;
  for (int i = 0; i < count && !fault; ++i) {
    const int index = first + (backwards ? count - 1 - i : i);
    if (fibers[index].done) continue;
    thread_index = {static_cast<unsigned>(index), 0, 0};
    swapcontext(&scheduler, &fibers[index].context);
    left = left || !fibers[index].done;
  }
  return left;
}

bool run_block(bool backwards) {
  const int count = static_cast<int>(block_size.x), warp_count = (count + WARP - 1) / WARP;
  for (Warp& warp : warps) warp.barrier = {};
  block_barrier = {};
  for (int i = 0; i < count; ++i) {
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = &stacks[i * STACK_BYTES];
    fibers[i].context.uc_stack.ss_size = STACK_BYTES;
    fibers[i].context.uc_link = &scheduler;
    fibers[i].done = false;
    makecontext(&fibers[i].context, start, 0);
  }
  bool left = true, moved = true;
  while (left && moved && !fault) {
    left = moved = false;
    for (int i = 0; i < warp_count; ++i) {
      bool waits = true;
      do {  // a warp goes as far ahead of the others as it can
        progress = false;
        waits = run_warp(backwards ? warp_count - 1 - i : i, backwards);
        moved = moved || progress;
      } while (waits && progress && !fault);
      left = left || waits;
    }
  }
  return !left && !fault;
}

bool run_grid(size_t shared_bytes) {
  static unsigned launches;
  const bool backwards = launches++ % 2;
  const unsigned count = grid_size.x * grid_size.y;
  fault = false;
  for (unsigned i = 0; i < count; ++i) {
    const unsigned index = backwards ? count - 1 - i : i;
    block_index = {index % grid_size.x, index / grid_size.x, 0};
    std::memset(scratch, POISON, sizeof scratch);
    if (!run_block(backwards)) return false;
    for (size_t j = shared_bytes; j < sizeof scratch; ++j) {
      if (scratch[j] != POISON) return false;
    }
  }
  return true;
}

}  // namespace emulation

// The driver's API, with the error numbers of cuda.h ---------------------------------------------

extern "C" {

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, NOT_FOUND = 500, LAUNCH_FAILED = 719 };

int cuInit(unsigned) { return SUCCESS; }

int cuDriverGetVersion(int* version) {
  *version = 12060;
  return SUCCESS;
}

int cuGetErrorName(int status, const char** name) {
  switch (status) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return SUCCESS;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; return SUCCESS;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; return SUCCESS;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; return SUCCESS;
    default: return INVALID_VALUE;
  }
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 75: *value = 8; return SUCCESS;
    case 76: *value = 7; return SUCCESS;
    case 16: *value = 1; return SUCCESS;  // few, so that threads go round
    default: return INVALID_VALUE;
  }
}

static int contexts;

int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &contexts;
  return SUCCESS;
}

int cuCtxPushCurrent_v2(void* context) {
  ++contexts;
  return context == &contexts ? SUCCESS : INVALID_VALUE;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = &contexts;
  return contexts-- > 0 ? SUCCESS : INVALID_VALUE;
}

int cuModuleLoadData(void** module, const void*) {
  *module = &contexts;
  return contexts ? SUCCESS : INVALID_VALUE;
}

int cuModuleGetFunction(void** function, void*, const char* name) {
  static const struct {
    const char* name;
    emulation::Kernel kernel;
  } KERNELS[] = {
      {"reduce_rows", reduce_rows},     {"sum_columns", sum_columns},
      {"span_columns", span_columns},   {"span_tensor", span_tensor},
      {"finish_sums", finish_sums},     {"finish_spans", finish_spans},
      {"encode_groups", encode_groups}, {"decode_groups", decode_groups},
      {"encode_pairs", encode_pairs},   {"finish_pairs", finish_pairs},
  };
  for (const auto& entry : KERNELS) {
    if (std::strcmp(entry.name, name)) continue;
    *function = reinterpret_cast<void*>(entry.kernel);
    return SUCCESS;
  }
  return NOT_FOUND;
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void*, void** parameters, void**) {
  if (!contexts || !grid_x || !grid_y || grid_y > 65535 || grid_z != 1 || !block_x ||
      block_x > emulation::MAX_THREADS || block_y != 1 || block_z != 1 ||
      shared_bytes > emulation::MAX_SHARED_BYTES) {
    return INVALID_VALUE;
  }
  emulation::kernel = reinterpret_cast<emulation::Kernel>(function);
  emulation::argument = static_cast<const Job*>(parameters[0]);
  emulation::grid_size = {grid_x, grid_y, 1};
  emulation::block_size = {block_x, 1, 1};
  return emulation::run_grid(shared_bytes) ? SUCCESS : LAUNCH_FAILED;
}

}  // extern "C"
