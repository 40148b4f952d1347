// What does not depend on the instruction set: format constants, derived codebooks, pages.

#ifndef DAF_COMMON_H
#define DAF_COMMON_H

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "abi.h"

namespace daf {

constexpr int GROUP = 256;
constexpr int LANES = 32;
constexpr int PARTS = GROUP / LANES;  // part i of a group is bit i of its plane bytes
constexpr int PAGE_BYTES = 1024;
constexpr int GROUPS_PER_PAGE = PAGE_BYTES / LANES;
constexpr int MAX_BITS = 8;
constexpr float SMALLEST_SCALE = 1e-30f;
constexpr int CHANNEL_BLOCK_ROWS = 64;
constexpr int CHANNEL_BLOCKS_MAX = 64;

constexpr int MERSENNE_WORDS = 624;

constexpr int BATCH = 8;  // groups worked on together, in L1; divides GROUPS_PER_PAGE
constexpr int CHUNK_GROUPS = 8 * GROUPS_PER_PAGE;  // groups that a thread takes at a time

// A look-up table as the sorted cells where the code changes: code(cell) is `base` plus the
// `deltas` of all `cells` that are <= cell (modulo 256; codes stand in the top bits of a byte).
struct Steps {
  static constexpr int MAX = 20;
  int count = 0;
  uint8_t base = 0;
  int16_t cells[MAX];
  int16_t deltas[MAX];
};

constexpr int COMPARE_BITS = 2;  // up to here planes come straight from comparisons

}  // namespace daf

// A codebook, and what is derived from its look-up table (or the identity).
struct daf_book {
  daf_codebook book;
  bool midpoints;  // tables are (code + 0.5) / 2^bits
  bool monotone;   // codes never decrease from cell to cell

  // Where `regular`, each code is the number of `thresholds` (from index 1 on) that are <= cell.
  bool regular[daf::COMPARE_BITS + 1];
  float thresholds[daf::COMPARE_BITS + 1][1 << daf::COMPARE_BITS];

  daf::Steps steps[daf::MAX_BITS + 1];

  // Where `monotone`, a binary tree: nodes[2^k + p] is the first cell that is past the codes
  // whose top k + 1 bits are (p, 0), or the least integer where that is the first of all, so that
  // bit k of a code of top bits p is `cell >= node`.
  // The last level is read in vectors of 32.
  int16_t nodes[256 + 32];
};

namespace daf {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The pages of one encoded tensor.
struct Pages {
  const int32_t* table;
  const int64_t* pointers;
  int shift;     // log2 of the pages of a segment
  int32_t mask;  // pages of a segment, less one

  uint8_t* page(int64_t index) const {
    const int32_t p = table[index];
    return reinterpret_cast<uint8_t*>(static_cast<intptr_t>(pointers[p >> shift])) +
           static_cast<int64_t>(p & mask) * PAGE_BYTES;
  }
};

// One call of daf_encode or daf_decode.
struct Job {
  const daf_layout* layout;
  const daf_book* book;
  int bits;
  daf_dtype dtype;
  const void* x;  // encode
  void* out;      // decode
  Pages pages;
  int threads;
  std::atomic<bool> failed;  // encode: something is not finite or not representable
};

struct Kernels {
  const char* isa;
  int (*encode)(Job& job);
  int (*decode)(Job& job);
  void (*noise)(daf_mersenne& engine, int64_t count, uint64_t threshold, int width, uint32_t value,
                void* out);
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace daf

#endif
