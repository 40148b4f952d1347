// Encode and decode on CUDA devices; compiled at run time by cuda.py, without CUDA's headers.
//
// The storage format, and every formula, is specified by format.py and reference.py. Results are
// theirs bit for bit: compile with -fmad=false and without fast math, so that nothing is
// contracted into fused multiply-adds, and division and square root are correctly rounded.
//
// A warp takes a group: lane `l` has its elements l, l + 32, ..., l + 224, which are the 8 bits of
// byte `l` in every plane. So lanes pack and unpack on their own, and memory is read and written
// in sequence by a warp. All kernels take one Job, and any grid: what is too much for it is taken
// in further rounds.

#include "elements.cuh"
#include "statistics.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(GROUP)

DEVICE i64 global_thread() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE i64 all_threads() { return static_cast<i64>(gridDim.x) * blockDim.x; }

// TOKEN: a warp a row.
KERNEL reduce_rows(const Job job) {
  const int lane = threadIdx.x % LANES;
  const i64 rows = job.units;
  for (i64 row = global_thread() / LANES; row < rows; row += all_threads() / LANES) {
    const i64 begin = row * job.cols, end = begin + job.cols;
    const float first = to_float(job.type, load(job, begin));
    Pair pair;
    if (wants_moments(job)) {
      Moments moments(first);
      for_each(job, begin + lane, end, LANES, [&](float x) { moments.add(x); });
      moments.merge_warp();
      pair = finish(job, moments, job.cols);
    } else {
      Range range(first);
      for_each(job, begin + lane, end, LANES, [&](float x) { range.add(x); });
      range.merge_warp();
      pair = finish(job, range);
    }
    if (lane == 0) store_pair(job, row, pair);
  }
}

// CHANNEL, and TENSOR as `width` = 32 columns: a thread a column of the rows of block blockIdx.y.
KERNEL sum_columns(const Job job) {
  const i64 rows = job.block_rows * job.width, block = blockIdx.y;
  const i64 end = (block + 1) * rows < job.numel ? (block + 1) * rows : job.numel;
  for (i64 column = global_thread(); column < job.width; column += all_threads()) {
    Moments moments(to_float(job.type, load(job, job.granularity == BY_TENSOR ? 0 : column)));
    for_each(job, block * rows + column, end, job.width, [&](float x) { moments.add(x); });
    job.sums[2 * block * job.width + column] = moments.sum;
    job.sums[(2 * block + 1) * job.width + column] = moments.squares;
  }
}

DEVICE void publish(const Job& job, i64 unit, float low, float high) {
  atomicMax(job.flags + 1 + unit, ~key_of(low));
  atomicMax(job.flags + 1 + job.units + unit, key_of(high));
}

// CHANNEL: as sum_columns.
KERNEL span_columns(const Job job) {
  const i64 rows = job.block_rows * job.width, block = blockIdx.y;
  const i64 end = (block + 1) * rows < job.numel ? (block + 1) * rows : job.numel;
  for (i64 column = global_thread(); column < job.width; column += all_threads()) {
    Range range(to_float(job.type, load(job, column)));
    for_each(job, block * rows + column, end, job.width, [&](float x) { range.add(x); });
    publish(job, column, range.low, range.high);
  }
}

// TENSOR: a tree in the block, then atomics across blocks.
KERNEL span_tensor(const Job job) {
  Range range(to_float(job.type, load(job, 0)));
  for_each(job, global_thread(), job.numel, all_threads(), [&](float x) { range.add(x); });
  const float low = reduce_block<Less>(range.low), high = reduce_block<More>(range.high);
  if (threadIdx.x == 0) publish(job, 0, low, high);
}

// What sum_columns left, block by block, to pairs; for TENSOR by one warp.
KERNEL finish_sums(const Job job) {
  for (i64 column = global_thread(); column < job.width; column += all_threads()) {
    const bool tensor = job.granularity == BY_TENSOR;
    Moments moments(to_float(job.type, load(job, tensor ? 0 : column)));
    for (i64 block = 0; block < job.blocks; ++block) {
      moments.sum += job.sums[2 * block * job.width + column];
      moments.squares += job.sums[(2 * block + 1) * job.width + column];
    }
    if (tensor) moments.merge_warp();
    const Pair pair = finish(job, moments, tensor ? job.numel : job.numel / job.width);
    if (column < job.units) store_pair(job, column, pair);
  }
}

// What was published, to pairs.
KERNEL finish_spans(const Job job) {
  for (i64 unit = global_thread(); unit < job.units; unit += all_threads()) {
    Range range(float_of(~job.flags[1 + unit]));
    range.high = float_of(job.flags[1 + job.units + unit]);
    store_pair(job, unit, finish(job, range));
  }
}

// Whole tensors ----------------------------------------------------------------------------------

// get(unit) for each of a lane's elements, or once where they share a unit.
template <class Value, class Get>
DEVICE void for_parts(const Job& job, i64 group, int lane, u32 there, const Get& get,
                      Value* values) {
  if (job.units <= 1 || job.granularity == BY_GROUP) {
    values[0] = get(job.units <= 1 ? 0 : group);
#pragma unroll
    for (int i = 1; i < PARTS; ++i) values[i] = values[0];
    return;
  }
  i64 row = (group * GROUP + lane) / job.cols, col = (group * GROUP + lane) % job.cols;
  i64 before = -1;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const i64 unit = job.granularity == BY_TOKEN ? row : col;
    if (i && (unit == before || !(there >> i & 1))) {
      values[i] = values[i - 1];
    } else {
      values[i] = get(there & 1 ? unit : 0);
    }
    before = unit;
    col += LANES;
    if (col >= job.cols) {
      row += col / job.cols;
      col %= job.cols;
    }
  }
}

// Copies `count` values to the block's scratch memory; null stays null.
template <class Value>
DEVICE const Value* stage(const Value* values, int count) {
  if (!values) return nullptr;
  Value* copy = reinterpret_cast<Value*>(scratch);
  for (int j = threadIdx.x; j < count; j += blockDim.x) copy[j] = values[j];
  __syncthreads();
  return copy;
}

// Where a unit's cells start, and how many there are to 1.
struct Grid {
  float origin, density;
};

DEVICE u32 code_of(const Job& job, const u8* lut, float x, Grid grid) {
  const float last = static_cast<float>(job.cells - 1);
  float cell = (x - grid.origin) * grid.density;
  cell = cell > 0.0f ? cell : 0.0f;  // also a NaN, of an infinity times 0
  cell = cell < last ? cell : last;
  const int index = static_cast<int>(cell);
  return lut ? lut[index] : index;
}

// The planes, and what of the statistics a group has to itself; also looks for what is not finite.
KERNEL encode_groups(const Job job) {
  const u8* lut = stage(job.lut, job.cells);
  const int lane = threadIdx.x % LANES;
  for (i64 group = global_thread() / LANES; group < job.groups; group += all_threads() / LANES) {
    if (group == job.groups - 1) clear_tail(job, lane);
    const bool own = job.units && job.granularity == BY_GROUP;
    if (!own && job.units && !job.bits) continue;
    const u32 there = present(job, group, lane);
    u32 raw[PARTS];
    float x[PARTS];
    load_group(job, group, lane, there, raw);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      x[i] = to_float(job.type, raw[i]);
      finite = finite && x[i] - x[i] == 0.0f;
    }
    if (!finite) fail(job);
    Pair pair;
    if (own) {
      pair = group_pair(job, group, x);
      if (lane == 0) store_pair(job, group, pair);
    }
    if (!job.bits) continue;
    Grid grids[PARTS];
    for_parts(job, group, lane, there, [&](i64 unit) -> Grid {
      const Pair p = own ? pair : load_pair(job, unit);
      const float density = p.s > SMALLEST_SCALE ? job.grid_density / p.s : 0.0f;
      return {p.a + p.s * job.grid_origin, density};
    }, grids);
    u32 codes[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) codes[i] = code_of(job, lut, x[i], grids[i]);
    for (int k = 0; k < job.bits; ++k) {
      u32 byte = 0;
#pragma unroll
      for (int i = 0; i < PARTS; ++i) byte |= (codes[i] >> (MAX_BITS - 1 - k) & 1) << i;
      plane(job, k, group)[lane] = byte & there;
    }
  }
}

KERNEL decode_groups(const Job job) {
  const float* table = stage(job.values, 1 << job.bits);
  const float scale = 1.0f / static_cast<float>(1 << job.bits);
  const int lane = threadIdx.x % LANES;
  for (i64 group = global_thread() / LANES; group < job.groups; group += all_threads() / LANES) {
    u32 codes[PARTS] = {};
    for (int k = 0; k < job.bits; ++k) {
      const u32 byte = plane(job, k, group)[lane];
#pragma unroll
      for (int i = 0; i < PARTS; ++i) codes[i] = codes[i] << 1 | (byte >> i & 1);
    }
    const i64 first = group * GROUP + lane;
    const u32 there = present(job, group, lane);
    Pair pairs[PARTS];
    for_parts(job, group, lane, there, [&](i64 unit) { return load_pair(job, unit); }, pairs);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      float value;
      if (job.statistics == PAIR) {
        value = codes[i] ? pairs[i].s : pairs[i].a;
      } else if (table) {
        value = pairs[i].a + pairs[i].s * table[codes[i]];
      } else {  // codes to floats: the low bits of 2^23
        const float code = __uint_as_float(0x4b000000u | codes[i]) - 8388608.0f;
        value = pairs[i].a + pairs[i].s * ((code + 0.5f) * scale);
      }
      if (there >> i & 1) store(job, first + i * LANES, value);
    }
  }
}

// Two values, told apart by their bits: `flags` collects in what they differ from the first, and
// in what they do not; where both have a bit, there is a third value.
KERNEL encode_pairs(const Job job) {
  const u32 first = load(job, 0);
  const int lane = threadIdx.x % LANES;
  u32 differs = 0, agrees = 0;
  for (i64 group = global_thread() / LANES; group < job.groups; group += all_threads() / LANES) {
    if (group == job.groups - 1) clear_tail(job, lane);
    const u32 there = present(job, group, lane);
    u32 raw[PARTS], byte = 0;
    load_group(job, group, lane, there, raw);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const u32 difference = there >> i & 1 ? raw[i] ^ first : 0;
      if (!difference) continue;
      byte |= 1u << i;
      differs |= difference;
      agrees |= ~difference;
    }
    plane(job, 0, group)[lane] = byte;
  }
  differs = reduce_block<Or>(differs);
  agrees = reduce_block<Or>(agrees);
  if (threadIdx.x == 0) {
    atomicOr(job.flags + 1, differs);
    atomicOr(job.flags + 2, agrees);
  }
}

// What encode_pairs collected, to the pair; by one thread.
KERNEL finish_pairs(const Job job) {
  if (global_thread()) return;
  const u32 first = load(job, 0), differs = job.flags[1];
  if (differs & job.flags[2]) fail(job);
  store_pair(job, 0, {to_float(job.type, first), to_float(job.type, first ^ differs)});
}
