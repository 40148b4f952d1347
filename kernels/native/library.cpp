// The native CPU backend: one translation unit, a plain C ABI (abi.h), no Python and no torch.

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__x86_64__) && defined(__GNUC__)
#define DAF_X86 1
#pragma GCC diagnostic push
#if !defined(__clang__)  // GCC takes what these headers leave undefined on purpose for mistakes
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "common.h"
#include "parallel.inc"

// Every instruction set compiles the same source, in a namespace of its own.

#if defined(__aarch64__)
#define DAF_BASELINE_NAME "neon"  // which every such processor has
#else
#define DAF_BASELINE_NAME "baseline"  // on x86-64 that is SSE2
#endif

namespace daf {
namespace baseline {
#define DAF_WIDTH 4
#define DAF_ISA_NAME DAF_BASELINE_NAME
#include "codec.inc"
#undef DAF_WIDTH
#undef DAF_ISA_NAME
}  // namespace baseline
}  // namespace daf

#if DAF_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace daf {
namespace avx2 {
#define DAF_WIDTH 8
#define DAF_ISA_NAME "avx2"
#include "codec.inc"
#undef DAF_WIDTH
#undef DAF_ISA_NAME
}  // namespace avx2
}  // namespace daf
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
namespace daf {
namespace avx512 {
#define DAF_WIDTH 16
#define DAF_ISA_NAME "avx512"
#include "codec.inc"
#undef DAF_WIDTH
#undef DAF_ISA_NAME
}  // namespace avx512
}  // namespace daf
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,prefer-vector-width=512")
#endif
namespace daf {
namespace avx512vbmi {
#define DAF_WIDTH 16
#define DAF_VBMI 1
#define DAF_ISA_NAME "avx512vbmi"
#include "codec.inc"
#undef DAF_WIDTH
#undef DAF_VBMI
#undef DAF_ISA_NAME
}  // namespace avx512vbmi
}  // namespace daf
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // DAF_X86

namespace daf {
namespace {

// Best first.
int available(const Kernels** found) {
  int count = 0;
#if DAF_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512vbmi")) found[count++] = &avx512vbmi::KERNELS;
    found[count++] = &avx512::KERNELS;
  }
  if (__builtin_cpu_supports("avx2")) found[count++] = &avx2::KERNELS;
#endif
  found[count++] = &baseline::KERNELS;
  return count;
}

const Kernels* find(const char* name) {
  const Kernels* found[4];
  const int count = available(found);
  if (!name) return found[0];
  for (int i = 0; i < count; ++i) {
    if (!std::strcmp(found[i]->isa, name)) return found[i];
  }
  return nullptr;
}

const Kernels* active = find(nullptr);

Job make_job(const daf_layout* layout, int bits, int dtype, const int32_t* table,
             const int64_t* pointers, int64_t pages_per_segment, int threads) {
  int shift = 0;
  while ((int64_t{1} << shift) < pages_per_segment) ++shift;
  const Pages pages{table, pointers, shift, static_cast<int32_t>(pages_per_segment - 1)};
  return {layout, layout->book, bits, static_cast<daf_dtype>(dtype), nullptr, nullptr, pages,
          threads, {false}};
}

int code_of(const daf_codebook& book, int cell, int bits) {
  return (book.lut ? book.lut[cell] : cell) >> (MAX_BITS - bits);
}

// Sets what depends on the width.
void derive_steps(daf_book& book, int bits) {
  Steps& steps = book.steps[bits];
  steps.base = static_cast<uint8_t>(code_of(book.book, 0, bits) << (MAX_BITS - bits));
  steps.count = 0;
  bool regular = steps.base == 0;
  for (int cell = 1; cell < book.book.cells; ++cell) {
    const int delta = code_of(book.book, cell, bits) - code_of(book.book, cell - 1, bits);
    if (!delta) continue;
    regular = regular && delta == 1;
    if (steps.count < Steps::MAX) {
      steps.cells[steps.count] = static_cast<int16_t>(cell);
      steps.deltas[steps.count] = static_cast<int16_t>(delta * (1 << (MAX_BITS - bits)));
    }
    ++steps.count;
  }
  if (bits > COMPARE_BITS) return;
  book.regular[bits] = regular && steps.count == (1 << bits) - 1;
  for (int i = 0; book.regular[bits] && i < steps.count; ++i) {
    book.thresholds[bits][i + 1] = steps.cells[i];
  }
}

void derive_nodes(daf_book& book) {
  const int cells = book.book.cells;
  book.monotone = true;
  for (int cell = 1; cell < cells; ++cell) {
    book.monotone &= code_of(book.book, cell, MAX_BITS) >= code_of(book.book, cell - 1, MAX_BITS);
  }
  std::memset(book.nodes, 0, sizeof book.nodes);
  for (int level = 0; level < MAX_BITS; ++level) {
    for (int prefix = 0; prefix < 1 << level; ++prefix) {
      int cell = 0;
      while (cell < cells && code_of(book.book, cell, level + 1) < 2 * prefix + 1) ++cell;
      // Also what lies before the first cell is in it.
      book.nodes[(1 << level) + prefix] = cell ? static_cast<int16_t>(cell) : INT16_MIN;
    }
  }
}

bool has_midpoints(const daf_codebook& book) {
  for (int bits = 0; bits <= MAX_BITS; ++bits) {
    for (int code = 0; code < 1 << bits; ++code) {
      if (book.tables[bits][code] != (code + 0.5f) * (1.0f / (1 << bits))) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace daf

extern "C" {

int daf_abi_version(void) { return DAF_ABI_VERSION; }

const char* daf_isa(void) { return daf::active->isa; }

const char* daf_compiler(void) {
#if defined(__clang__)
  return __VERSION__;  // names itself
#else
  return "GCC " __VERSION__;
#endif
}

int daf_has_isa(const char* name) { return daf::find(name) != nullptr; }

int daf_use_isa(const char* name) {
  const daf::Kernels* found = daf::find(name);
  if (found) daf::active = found;
  return found != nullptr;
}

daf_book* daf_book_create(const daf_codebook* codebook) {
  daf_book* book = new (std::nothrow) daf_book;
  if (!book) return nullptr;
  book->book = *codebook;
  book->midpoints = daf::has_midpoints(*codebook);
  for (int bits = 0; bits <= daf::MAX_BITS; ++bits) daf::derive_steps(*book, bits);
  daf::derive_nodes(*book);
  return book;
}

void daf_book_destroy(daf_book* book) { delete book; }

int daf_encode(const daf_layout* layout, int bits, int dtype, const void* x, const int32_t* table,
               const int64_t* pointers, int64_t pages_per_segment, int threads) {
  if (!layout->numel) return 1;
  daf::Job job = daf::make_job(layout, bits, dtype, table, pointers, pages_per_segment, threads);
  job.x = x;
  return daf::active->encode(job);
}

int daf_decode(const daf_layout* layout, int bits, int dtype, void* out, const int32_t* table,
               const int64_t* pointers, int64_t pages_per_segment, int threads) {
  if (!layout->numel) return 1;
  daf::Job job = daf::make_job(layout, bits, dtype, table, pointers, pages_per_segment, threads);
  job.out = out;
  return daf::active->decode(job);
}

int daf_noise_begin(daf_mersenne* engine, const uint8_t* state) {
  // seed (64 bits), words left and one (32), seeded (32), next word (64), words (64 each)
  int32_t left;
  std::memcpy(&left, state + 8, sizeof left);
  if (left < 1 || left > daf::MERSENNE_WORDS) return 0;
  for (int i = 0; i < daf::MERSENNE_WORDS; ++i) {
    uint64_t word;
    std::memcpy(&word, state + 24 + 8 * i, sizeof word);
    if (word >> 32) return 0;
    engine->words[i] = static_cast<uint32_t>(word);
  }
  engine->next = daf::MERSENNE_WORDS + 1 - left;
  return 1;
}

void daf_noise(daf_mersenne* engine, int64_t count, uint64_t threshold, int width, uint32_t value,
               void* out) {
  daf::active->noise(*engine, count, threshold, width, value, out);
}

}  // extern "C"
