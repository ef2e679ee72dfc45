#include "own_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <utility>

#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/device_context.h"
#include "paddle/phi/core/kernel_factory.h"

namespace sim {

namespace {

using phi::DataType;
using phi::DenseTensor;
using phi::DeviceContext;

// Paddle's cross entropy over cut classes, which it has for every custom device, hands on the labels of other ranks: on a
// device they give a row of zeros, where the CPU's kernel raises.
template <typename T>
void one_hot(const DeviceContext& context, const DenseTensor& x, const phi::Scalar& depth, DenseTensor* out) {
  auto width = depth.to<int64_t>();
  float* to = context.Alloc<float>(out);
  std::fill_n(to, out->numel(), 0.f);
  const T* from = x.data<T>();
  for (int64_t i = 0; i < x.numel(); ++i)
    if (from[i] >= 0 && from[i] < width) to[i * width + from[i]] = 1.f;
}

// Causal attention's softmax over [..., length, length]: on an accelerator Paddle takes a fused kernel, whose counterpart
// on the CPU raises.
template <typename T>
void causal_softmax(const DeviceContext& context, const DenseTensor& x, DenseTensor* out) {
  auto length = x.dims()[x.dims().size() - 1], rows = x.numel() / length;
  const T* from = x.data<T>();
  T* to = context.Alloc<T>(out);
  for (int64_t row = 0; row < rows; ++row, from += length, to += length) {
    int64_t seen = row % length + 1;
    T most = *std::max_element(from, from + seen), sum = 0;
    for (int64_t i = 0; i < seen; ++i) sum += to[i] = std::exp(from[i] - most);
    for (int64_t i = 0; i < seen; ++i) to[i] /= sum;
    std::fill(to + seen, to + length, T(0));
  }
}
template <typename T>
void causal_softmax_gradient(const DeviceContext& context, const DenseTensor& softmax, const DenseTensor& of_out, DenseTensor* gradient) {
  auto length = softmax.dims()[softmax.dims().size() - 1], rows = softmax.numel() / length;
  const T *p = softmax.data<T>(), *each = of_out.data<T>();
  T* to = context.Alloc<T>(gradient);
  for (int64_t row = 0; row < rows; ++row, p += length, each += length, to += length) {
    T dot = 0;
    for (int64_t i = 0; i < length; ++i) dot += p[i] * each[i];
    for (int64_t i = 0; i < length; ++i) to[i] = p[i] * (each[i] - dot);
  }
}

// Paddle has these two for every custom device, but not for 8-byte types: they go as twice as many floats, bit by bit.
using Joining = void (*)(const DeviceContext&, const DenseTensor&, int, int, int, bool, bool, DenseTensor*);
using Parting = void (*)(const DeviceContext&, const DenseTensor&, int, int, bool, DenseTensor*);
Joining join_floats;
Parting part_floats;

void describe_as(DenseTensor* tensor, DataType type, const phi::DDim& dims) {  // set_meta refuses a second time
  const_cast<phi::DenseTensorMeta&>(tensor->meta()) = phi::DenseTensorMeta(type, dims);
}
DenseTensor as_floats(const DenseTensor& x, int64_t times = 2, int64_t parts = 1) {
  DenseTensor view(x);
  auto dims = x.dims();
  dims[dims.size() - 1] = dims[dims.size() - 1] * times / parts;
  auto offset = x.meta().offset;
  describe_as(&view, DataType::FLOAT32, dims);
  const_cast<phi::DenseTensorMeta&>(view.meta()).offset = offset;
  return view;
}
template <typename T>
void from_floats(const DenseTensor& floats, DenseTensor* out) {
  auto dims = floats.dims();
  dims[dims.size() - 1] /= 2;
  out->clear();
  describe_as(out, phi::CppTypeToDataType<T>::Type(), dims);
  out->ResetHolder(floats.Holder());
}
template <typename T>
void join_wide(const DeviceContext& context, const DenseTensor& x, int rank, int ranks, int ring, bool calc, bool parallel, DenseTensor* out) {
  DenseTensor made;
  made.set_meta(as_floats(x, 2 * ranks).meta());
  join_floats(context, as_floats(x), rank, ranks, ring, calc, parallel, &made);
  from_floats<T>(made, out);
}
template <typename T>
void part_wide(const DeviceContext& context, const DenseTensor& x, int rank, int ranks, bool parallel, DenseTensor* out) {
  DenseTensor made;
  made.set_meta(as_floats(x, 2, ranks).meta());
  part_floats(context, as_floats(x), rank, ranks, parallel, &made);
  from_floats<T>(made, out);
}

// These two it has in float16, and not in bfloat16: the same function, which goes by the tensor's type where it adds up,
// and otherwise copies bits.
using Identity = void (*)(const DeviceContext&, const DenseTensor&, int, bool, bool, DenseTensor*);
using Summing = void (*)(const DeviceContext&, const DenseTensor&, DenseTensor*);
Identity identity_of_halves;
Summing sum_of_halves;

void set_type(DenseTensor* tensor, DataType type) { const_cast<phi::DenseTensorMeta&>(tensor->meta()).dtype = type; }

void identity_bfloat16(const DeviceContext& context, const DenseTensor& x, int ring, bool calc, bool parallel, DenseTensor* out) {
  DenseTensor given(x);
  set_type(&given, DataType::FLOAT16);
  set_type(out, DataType::FLOAT16);
  identity_of_halves(context, given, ring, calc, parallel, out);
  set_type(out, DataType::BFLOAT16);
}
void sum_bfloat16(const DeviceContext& context, const DenseTensor& x, DenseTensor* out) {
  DenseTensor given(x);  // `out` may be `x`, and is described otherwise while the function allocates it
  set_type(out, DataType::FLOAT16);
  sum_of_halves(context, given, out);
  set_type(out, DataType::BFLOAT16);
}

template <typename F>
void add_bfloat16(const char* name, phi::Backend backend, F* halves, F function) {
  auto& kernels = phi::KernelFactory::Instance().kernels()[name];
  auto found = kernels.find(phi::KernelKey(phi::Backend::CUSTOM, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT16));
  if (found == kernels.end()) return;
  *halves = found->second.GetVariadicKernelFn<F>();
  phi::Kernel like = found->second;
  phi::Kernel made([](phi::KernelContext*) { std::abort(); }, reinterpret_cast<void*>(function));  // no executor asks for it
  *made.mutable_args_def() = like.args_def();
  for (auto& def : made.mutable_args_def()->input_defs()) def.dtype = DataType::BFLOAT16;
  for (auto& def : made.mutable_args_def()->output_defs()) def.dtype = DataType::BFLOAT16;
  kernels[phi::KernelKey(backend, phi::DataLayout::ALL_LAYOUT, DataType::BFLOAT16)] = made;
}

template <typename F>
void add_wide(const char* name, phi::Backend backend, F* floats, F whole, F real) {
  auto& kernels = phi::KernelFactory::Instance().kernels()[name];
  auto found = kernels.find(phi::KernelKey(phi::Backend::CUSTOM, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT32));
  if (found == kernels.end()) return;
  *floats = found->second.GetVariadicKernelFn<F>();
  phi::Kernel like = found->second;
  for (auto type : {DataType::INT64, DataType::FLOAT64}) {
    auto* function = reinterpret_cast<void*>(type == DataType::INT64 ? whole : real);
    phi::Kernel made([](phi::KernelContext*) { std::abort(); }, function);  // no executor asks for it
    *made.mutable_args_def() = like.args_def();
    for (auto& def : made.mutable_args_def()->input_defs()) def.dtype = type;
    for (auto& def : made.mutable_args_def()->output_defs()) def.dtype = type;
    kernels[phi::KernelKey(backend, phi::DataLayout::ALL_LAYOUT, type)] = made;
  }
}

}  // namespace

void* function_instead(const std::string& kernel, DataType type) {
  static const std::map<std::pair<std::string, DataType>, void*> functions = {
      {{"one_hot", DataType::INT32}, reinterpret_cast<void*>(one_hot<int32_t>)},
      {{"one_hot", DataType::INT64}, reinterpret_cast<void*>(one_hot<int64_t>)},
      {{"fused_softmax_mask_upper_triangle", DataType::FLOAT32}, reinterpret_cast<void*>(causal_softmax<float>)},
      {{"fused_softmax_mask_upper_triangle", DataType::FLOAT64}, reinterpret_cast<void*>(causal_softmax<double>)},
      {{"fused_softmax_mask_upper_triangle_grad", DataType::FLOAT32}, reinterpret_cast<void*>(causal_softmax_gradient<float>)},
      {{"fused_softmax_mask_upper_triangle_grad", DataType::FLOAT64}, reinterpret_cast<void*>(causal_softmax_gradient<double>)},
  };
  auto found = functions.find({kernel, type});
  return found == functions.end() ? nullptr : found->second;
}

bool adds_up(const std::string& kernel) {
  for (auto* one : {"sum", "sum_raw", "mean", "mean_raw", "softmax", "softmax_grad", "log_softmax", "log_softmax_grad", "layer_norm",
                    "layer_norm_grad", "cumsum", "reduce_sum", "p_norm", "squared_l2_norm", "add_n", "embedding_grad"})
    if (kernel == one) return true;
  return false;
}

// Of logits in bfloat16 the loss is float32 (not of those in float16), and the gradient's kernel is chosen by the loss.
DataType mixed_in(const std::string& kernel) {
  return kernel == "cross_entropy_with_softmax_grad" ? DataType::BFLOAT16 : DataType::UNDEFINED;
}

void add_missing_types(phi::Backend backend) {
  add_wide<Joining>("c_concat", backend, &join_floats, join_wide<int64_t>, join_wide<double>);
  add_wide<Parting>("c_split", backend, &part_floats, part_wide<int64_t>, part_wide<double>);
  add_bfloat16<Identity>("c_identity", backend, &identity_of_halves, identity_bfloat16);
  add_bfloat16<Summing>("mp_allreduce_sum", backend, &sum_of_halves, sum_bfloat16);
}

}  // namespace sim
