// What a kernel is given, elements and pages. Included by kernels.cu.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int GROUP = 256;
constexpr int LANES = 32;
constexpr int PARTS = GROUP / LANES;
constexpr int PAGE_BYTES = 1024;
constexpr int GROUPS_PER_PAGE = PAGE_BYTES / LANES;
constexpr int MAX_BITS = 8;
constexpr float SMALLEST_SCALE = 1e-30f;
constexpr u32 ALL = 0xffffffffu;

enum Granularity { BY_GROUP, BY_TOKEN, BY_CHANNEL, BY_TENSOR };
enum Statistics { NONE, RANGE, MOMENTS, PAIR };
enum Type { FLOAT32, BFLOAT16, FLOAT16, UINT8, BOOL };

// Mirrors cuda.py's Job.
struct Job {
  void* data;             // encode: the input; decode: the output
  const int* table;       // page numbers
  const i64* segments;    // addresses
  const u8* lut;          // codebook's, or null
  const float* values;    // codebook's, at this width; null where it is (code + 0.5) / 2^bits
  u32* flags;             // [0]: not representable; from [1] on what is reduced atomically; zeros
  float* sums;            // [blocks][2][width]: partial sums of (x - first) and of its square
  i64 numel, cols, groups, plane_pages, units, statistics_pages;
  i64 width, block_rows, blocks;  // of the ordered sums
  int granularity, statistics, wide, bits, type;
  int shift, mask;        // log2 of the pages of a segment; their number, less one
  int cells;
  float grid_origin, grid_density;
};

#define DEVICE __device__ __forceinline__

extern __shared__ __align__(16) u8 scratch[];

// Elements ---------------------------------------------------------------------------------------

DEVICE float from_bfloat16(u32 h) { return __uint_as_float(h << 16); }

DEVICE u32 to_bfloat16(float value) {
  const u32 bits = __float_as_uint(value);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32 nan = (bits >> 16) | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

DEVICE float from_float16(u32 h) {
  const u32 magnitude = h & 0x7fffu, sign = (h & 0x8000u) << 16;
  const u32 denormal = __float_as_uint(static_cast<float>(magnitude) * 0x1p-24f);
  const u32 rebiased = (magnitude << 13) + ((magnitude >= 0x7c00u ? 224u : 112u) << 23);
  return __uint_as_float(sign | (magnitude < 0x0400u ? denormal : rebiased));
}

DEVICE u32 to_float16(float value) {
  const u32 bits = __float_as_uint(value);
  const u32 magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  const u32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const u32 denormal = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
  const u32 nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const u32 large = magnitude > 0x7f800000u ? nan : 0x7c00u;
  const u32 small = magnitude < (113u << 23) ? denormal : normal;
  return sign | (magnitude >= (143u << 23) ? large : small);
}

DEVICE float to_float(int type, u32 raw) {
  if (type == FLOAT32) return __uint_as_float(raw);
  if (type == BFLOAT16) return from_bfloat16(raw);
  if (type == FLOAT16) return from_float16(raw);
  return static_cast<float>(raw);
}

DEVICE u32 load(const Job& job, i64 index) {
  if (job.type == FLOAT32) return static_cast<const u32*>(job.data)[index];
  if (job.type <= FLOAT16) return static_cast<const u16*>(job.data)[index];
  return static_cast<const u8*>(job.data)[index];
}

DEVICE void store(const Job& job, i64 index, float value) {
  switch (job.type) {
    case FLOAT32: static_cast<float*>(job.data)[index] = value; return;
    case BFLOAT16: static_cast<u16*>(job.data)[index] = to_bfloat16(value); return;
    case FLOAT16: static_cast<u16*>(job.data)[index] = to_float16(value); return;
    case UINT8: static_cast<u8*>(job.data)[index] = static_cast<u8>(value); return;
    case BOOL: static_cast<u8*>(job.data)[index] = value != 0.0f; return;
  }
}

template <class Raw>
DEVICE void load_parts(const void* data, i64 first, u32 there, u32* raw) {
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    raw[i] = there >> i & 1 ? static_cast<const Raw*>(data)[first + i * LANES] : Raw{0};
  }
}

// A bit for each of a lane's elements that is there.
DEVICE u32 present(const Job& job, i64 group, int lane) {
  const i64 left = job.numel - group * GROUP - lane;
  u32 there = 0;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) there |= static_cast<u32>(left > i * LANES) << i;
  return there;
}

// A lane's elements as they stand in memory, all loads under way together; those past the end are
// the group's first.
DEVICE void load_group(const Job& job, i64 group, int lane, u32 there, u32* raw) {
  const i64 first = group * GROUP + lane;
  if (job.type == FLOAT32) {
    load_parts<u32>(job.data, first, there, raw);
  } else if (job.type <= FLOAT16) {
    load_parts<u16>(job.data, first, there, raw);
  } else {
    load_parts<u8>(job.data, first, there, raw);
  }
  const u32 padding = __shfl_sync(ALL, raw[0], 0);
#pragma unroll
  for (int i = 0; i < PARTS; ++i) raw[i] = there >> i & 1 ? raw[i] : padding;
}

template <int TYPE, class Raw, class Use>
DEVICE void visit(const Job& job, i64 begin, i64 end, i64 stride, const Use& use) {
  const Raw* data = static_cast<const Raw*>(job.data);
#pragma unroll 8
  for (i64 j = begin; j < end; j += stride) use(to_float(TYPE, data[j]));
}

// use(value) for the elements begin, begin + stride, ... before end, in this order.
template <class Use>
DEVICE void for_each(const Job& job, i64 begin, i64 end, i64 stride, const Use& use) {
  if (job.type == FLOAT32) return visit<FLOAT32, u32>(job, begin, end, stride, use);
  if (job.type == BFLOAT16) return visit<BFLOAT16, u16>(job, begin, end, stride, use);
  visit<FLOAT16, u16>(job, begin, end, stride, use);
}

// Pages ------------------------------------------------------------------------------------------

DEVICE u8* page(const Job& job, i64 index) {
  const int p = job.table[index];
  return reinterpret_cast<u8*>(job.segments[p >> job.shift]) +
         static_cast<i64>(p & job.mask) * PAGE_BYTES;
}

DEVICE u8* plane(const Job& job, int k, i64 group) {
  const i64 index = job.statistics_pages + k * job.plane_pages + group / GROUPS_PER_PAGE;
  return page(job, index) + group % GROUPS_PER_PAGE * LANES;
}

struct Pair {
  float a, s;
};

DEVICE u32* pair_at(const Job& job, i64 unit) {
  const i64 byte = unit * (job.wide ? 8 : 4);
  return reinterpret_cast<u32*>(page(job, byte / PAGE_BYTES) + byte % PAGE_BYTES);
}

DEVICE void store_pair(const Job& job, i64 unit, Pair pair) {
  u32* to = pair_at(job, unit);
  if (job.wide) {
    to[0] = __float_as_uint(pair.a);
    to[1] = __float_as_uint(pair.s);
  } else {
    to[0] = to_bfloat16(pair.a) | to_bfloat16(pair.s) << 16;
  }
}

DEVICE Pair load_pair(const Job& job, i64 unit) {
  if (!job.units) return {0.0f, 1.0f};
  const u32* from = pair_at(job, unit);
  if (job.wide) return {__uint_as_float(from[0]), __uint_as_float(from[1])};
  return {from_bfloat16(from[0] & 0xffffu), from_bfloat16(from[0] >> 16)};
}

// Zeros in what the last pages hold beyond the tensor; for the warp of the last group.
DEVICE void clear_tail(const Job& job, int lane) {
  const int used = static_cast<int>((job.groups - 1) % GROUPS_PER_PAGE) * LANES + LANES;
  for (int k = 0; k < job.bits; ++k) {
    u8* last = plane(job, k, job.groups - 1) + LANES;
    for (int j = lane; j < PAGE_BYTES - used; j += LANES) last[j] = 0;
  }
  const int pairs = static_cast<int>(job.units * (job.wide ? 8 : 4) % PAGE_BYTES);
  if (!pairs) return;
  u8* last = page(job, job.statistics_pages - 1);
  for (int j = pairs + lane; j < PAGE_BYTES; j += LANES) last[j] = 0;
}
