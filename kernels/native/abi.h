// The C ABI of the native backend: what daf_hf/kernels/cpu.py declares with ctypes.
//
// The storage format, and every formula, is specified by format.py and reference.py.

#ifndef DAF_ABI_H
#define DAF_ABI_H

#include <stdint.h>

#define DAF_ABI_VERSION 3

#define DAF_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum daf_granularity { DAF_GROUP, DAF_TOKEN, DAF_CHANNEL, DAF_TENSOR };
enum daf_statistics { DAF_NONE, DAF_RANGE, DAF_MOMENTS, DAF_PAIR };
enum daf_dtype { DAF_FLOAT32, DAF_BFLOAT16, DAF_FLOAT16, DAF_UINT8, DAF_BOOL };

// Mirrors format.Codebook. The arrays must outlive the daf_book made of it.
typedef struct {
  int32_t statistics;
  float grid_origin;
  float grid_density;
  int32_t cells;
  const uint8_t* lut;      // [cells], or null for the identity
  const float* tables[9];  // [2^bits] for each width
} daf_codebook;

typedef struct daf_book daf_book;  // a codebook with what the kernels derive from it

// Mirrors format.Layout.
typedef struct {
  int64_t numel, cols, rows, groups, plane_pages, units, statistics_pages;
  int32_t granularity;
  int32_t wide;
  const daf_book* book;
} daf_layout;

// A Mersenne Twister: its words, and the index of the next one to be taken (624: none is left).
typedef struct {
  uint32_t words[624];
  int32_t next;
} daf_mersenne;

// Where pages are: page p is at pointers[p / pages_per_segment] + (p % pages_per_segment) pages.
typedef struct {
  const int32_t* table;
  const int64_t* pointers;
  int64_t pages_per_segment;  // a power of two
} daf_pages;

DAF_EXPORT int daf_abi_version(void);

// The instruction set in use: "avx512vbmi", "avx512", "avx2" or "baseline" (SSE2) on x86-64, "neon"
// on AArch64, "baseline" elsewhere.
DAF_EXPORT const char* daf_isa(void);

// The compiler that this was built with, and its version.
DAF_EXPORT const char* daf_compiler(void);

// Whether this CPU and build have the named instruction set.
DAF_EXPORT int daf_has_isa(const char* name);

// Uses the named instruction set from now on. 0 where this CPU or build lacks it.
DAF_EXPORT int daf_use_isa(const char* name);

// Null when out of memory.
DAF_EXPORT daf_book* daf_book_create(const daf_codebook* codebook);
DAF_EXPORT void daf_book_destroy(daf_book* book);

// 1 when encoded; 0 when x is not finite or not representable; -1 when out of memory.
DAF_EXPORT int daf_encode(const daf_layout* layout, int bits, int dtype, const void* x,
                          const int32_t* table, const int64_t* pointers,
                          int64_t pages_per_segment, int threads);

// 1 when decoded; -1 when out of memory.
DAF_EXPORT int daf_decode(const daf_layout* layout, int bits, int dtype, void* out,
                          const int32_t* table, const int64_t* pointers,
                          int64_t pages_per_segment, int threads);

// Reads the state of torch's CPU generator. 0 where it is not one of a Mersenne Twister.
DAF_EXPORT int daf_noise_begin(daf_mersenne* engine, const uint8_t* state);

// Draws `count` elements of `width` bytes, 2 or 4: `value` where a uniform number of 53 bits is
// below `threshold`, else 0. Moves the engine on.
DAF_EXPORT void daf_noise(daf_mersenne* engine, int64_t count, uint64_t threshold, int width,
                          uint32_t value, void* out);

#ifdef __cplusplus
}
#endif

#endif
