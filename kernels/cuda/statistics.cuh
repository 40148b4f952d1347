// Reductions, and the pairs of statistics. Included by kernels.cu.

// Reductions -------------------------------------------------------------------------------------

struct Add { DEVICE float operator()(float x, float y) const { return x + y; } };
struct Less { DEVICE float operator()(float x, float y) const { return y < x ? y : x; } };
struct More { DEVICE float operator()(float x, float y) const { return y > x ? y : x; } };
struct Or { DEVICE u32 operator()(u32 x, u32 y) const { return x | y; } };

// The lanes folded in halves; every lane gets the result, as x op y is y op x.
template <class Op, class Value>
DEVICE Value reduce_warp(Value value) {
#pragma unroll
  for (int half = LANES / 2; half; half /= 2) {
    value = Op()(value, __shfl_xor_sync(ALL, value, half));
  }
  return value;
}

// Thread 0 gets the result of an `Op` that may see a value twice.
template <class Op, class Value>
DEVICE Value reduce_block(Value value) {
  Value* partial = reinterpret_cast<Value*>(scratch);
  value = reduce_warp<Op>(value);
  __syncthreads();  // the scratch may still be read for the value before
  if (threadIdx.x % LANES == 0) partial[threadIdx.x / LANES] = value;
  __syncthreads();
  if (threadIdx.x < LANES) {
    const u32 warps = blockDim.x / LANES;
    value = reduce_warp<Op>(partial[threadIdx.x < warps ? threadIdx.x : 0]);
  }
  return value;
}

// Unsigned integers in the order of the floats they are made of; never 0 for a finite one, nor
// are their complements. So both extremes are maxima over memory that starts as zeros.
DEVICE u32 key_of(float value) {
  const u32 bits = __float_as_uint(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float float_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

DEVICE void fail(const Job& job) { job.flags[0] = 1; }  // by any number of threads at once

// Statistics -------------------------------------------------------------------------------------

// Minimum and maximum. Comparisons skip a NaN; encode_groups looks for those.
struct Range {
  float low, high;

  DEVICE explicit Range(float first) : low(first), high(first) {}
  DEVICE void add(float x) {
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  DEVICE void merge_warp() {
    low = reduce_warp<Less>(low);
    high = reduce_warp<More>(high);
  }
};

// Sums of (x - first) and of its square.
struct Moments {
  float first, sum, squares;

  DEVICE explicit Moments(float first_) : first(first_), sum(0.0f), squares(0.0f) {}
  DEVICE void add(float x) {
    const float d = x - first;
    sum = sum + d;
    squares = squares + d * d;
  }
  DEVICE void merge_warp() {
    sum = reduce_warp<Add>(sum);
    squares = reduce_warp<Add>(squares);
  }
};

DEVICE bool wants_moments(const Job& job) { return job.bits == 0 || job.statistics == MOMENTS; }

DEVICE float rounded(const Job& job, float value) {
  return job.wide ? value : from_bfloat16(to_bfloat16(value));
}

DEVICE Pair checked(const Job& job, Pair pair) {
  if (pair.a - pair.a != 0.0f || pair.s - pair.s != 0.0f) fail(job);
  return pair;
}

// What is stored of a unit.
DEVICE Pair finish(const Job& job, const Range& range) {
  const float a = rounded(job, range.low) + 0.0f;  // no negative zeros
  return checked(job, {a, rounded(job, range.high - a) + 0.0f});
}

DEVICE Pair finish(const Job& job, const Moments& moments, i64 length) {
  const float count = static_cast<float>(length);
  const float shift = moments.sum / count;
  float variance = moments.squares / count - shift * shift;
  variance = variance < 0.0f ? 0.0f : variance;  // a NaN stays
  const float deviation = job.bits ? __fsqrt_rn(variance) : 0.0f;
  return checked(job, {rounded(job, moments.first + shift), rounded(job, deviation)});
}

DEVICE Pair group_pair(const Job& job, i64 group, const float* x) {
  const float first = __shfl_sync(ALL, x[0], 0);
  if (wants_moments(job)) {
    Moments moments(first);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) moments.add(x[i]);
    moments.merge_warp();
    const i64 left = job.numel - group * GROUP;
    return finish(job, moments, left < GROUP ? left : GROUP);
  }
  Range range(first);
#pragma unroll
  for (int i = 0; i < PARTS; ++i) range.add(x[i]);
  range.merge_warp();
  return finish(job, range);
}
