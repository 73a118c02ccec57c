// fill, cast, add, scale, add_bias.
#include "ops/cuda/elementwise.h"
#include "ops/ops.h"

namespace annulus::ops::cuda {
namespace {

template <class T>
struct FillBody {
  T* y;
  T value;
  template <int N>
  __device__ void run(std::int64_t i) const {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = value;
    store<N>(y + i, out);
  }
};

template <class T>
void launch_fill(const Context& ctx, const TensorView& y, T value) {
  launch_elementwise(ctx, y.numel(), aligned16(y), FillBody<T>{pointer<T>(y), value});
}

template <class X, class Y>
struct CastBody {
  const X* x;
  Y* y;
  template <int N>
  __device__ void run(std::int64_t i) const {
    const Pack<X, N> in = load<N>(x + i);
    Pack<Y, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (std::is_same_v<Y, double>) out.v[j] = static_cast<double>(in.v[j]);
      else if constexpr (std::is_same_v<X, double> && std::is_same_v<Y, Bf16>)
        out.v[j] = __double2bfloat16(in.v[j]);  // rounds once
      else out.v[j] = from_f32<Y>(to_f32(in.v[j]));
    }
    store<N>(y + i, out);
  }
};

template <class F>
void with_any_float(const char* operation, DType dtype, F&& f) {
  if (dtype == DType::f64) return f(double{});
  with_gpu_type(operation, dtype, f);
}

template <class T>
struct AddBody {
  const T *a, *b;
  T* y;
  template <int N>
  __device__ void run(std::int64_t i) const {
    const Pack<T, N> left = load<N>(a + i), right = load<N>(b + i);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = from_f32<T>(to_f32(left.v[j]) + to_f32(right.v[j]));
    store<N>(y + i, out);
  }
};

template <class T>
struct ScaleBody {
  T* y;
  float factor;
  template <int N>
  __device__ void run(std::int64_t i) const {
    Pack<T, N> out = load<N>(y + i);
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = from_f32<T>(to_f32(out.v[j]) * factor);
    store<N>(y + i, out);
  }
};

template <class T>
struct AddBiasBody {
  T* x;
  const T* bias;
  std::int64_t columns;
  template <int N>
  __device__ void run(std::int64_t i) const {
    Pack<T, N> out = load<N>(x + i);
    const Pack<T, N> b = load<N>(bias + i % columns);
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = from_f32<T>(to_f32(out.v[j]) + to_f32(b.v[j]));
    store<N>(x + i, out);
  }
};

}  // namespace

void fill(Context& ctx, const Fill& args) {  // statistics in f64 and counts in i32 live on the device too
  switch (args.y.dtype) {
    case DType::f32:
      return launch_fill(ctx, args.y, static_cast<float>(args.value));
    case DType::f64:
      return launch_fill(ctx, args.y, args.value);
    case DType::bf16:
      return launch_fill(ctx, args.y, std::bit_cast<Bf16>(to_bfloat16(static_cast<float>(args.value))));
    case DType::i32:
      return launch_fill(ctx, args.y, static_cast<std::int32_t>(args.value));
    case DType::i64:
      return launch_fill(ctx, args.y, static_cast<std::int64_t>(args.value));
    case DType::u8:
      return launch_fill(ctx, args.y, static_cast<std::uint8_t>(args.value));
    case DType::f16:
      break;
  }
  ANNULUS_CHECK(false, "a GPU operation got float16");
}

void cast(Context& ctx, const Cast& args) {
  if (args.x.dtype == args.y.dtype) {
    ANNULUS_CUDA_TRY(cudaMemcpyAsync(args.y.data, args.x.data, static_cast<std::size_t>(args.x.bytes()),
                                     cudaMemcpyDeviceToDevice, stream_of(ctx)));
    return;
  }
  with_any_float("cast", args.x.dtype, [&](auto from) {
    with_any_float("cast", args.y.dtype, [&](auto to) {
      using X = decltype(from);
      using Y = decltype(to);
      if constexpr (!std::is_same_v<X, Y>) {
        launch_elementwise(ctx, args.x.numel(), aligned16(args.x) && aligned16(args.y),
                           CastBody<X, Y>{pointer<X>(args.x), pointer<Y>(args.y)});
      }
    });
  });
}

void add(Context& ctx, const Add& args) {
  with_gpu_type("add", args.y.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_elementwise(ctx, args.y.numel(), aligned16(args.a) && aligned16(args.b) && aligned16(args.y),
                       AddBody<T>{pointer<T>(args.a), pointer<T>(args.b), pointer<T>(args.y)});
  });
}

void scale(Context& ctx, const Scale& args) {
  with_gpu_type("scale", args.y.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_elementwise(ctx, args.y.numel(), aligned16(args.y),
                       ScaleBody<T>{pointer<T>(args.y), static_cast<float>(args.factor)});
  });
}

void add_bias(Context& ctx, const AddBias& args) {
  with_gpu_type("add_bias", args.x.dtype, [&](auto tag) {
    using T = decltype(tag);
    const std::int64_t columns = args.bias.numel();
    launch_elementwise(ctx, args.x.numel(), packable(columns, args.x, args.bias),
                       AddBiasBody<T>{pointer<T>(args.x), pointer<T>(args.bias), columns});
  });
}

}  // namespace annulus::ops::cuda
