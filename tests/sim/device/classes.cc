#include "classes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/device_context.h"
#include "paddle/phi/core/kernel_factory.h"
#include "settings.h"
#include "stream.h"

namespace sim {

namespace {

using phi::DataType;
using phi::DenseTensor;
using phi::DeviceContext;

using Summing = void (*)(const DeviceContext&, const DenseTensor&, DenseTensor*);
Summing sum_over_ranks;  // mp_allreduce_sum

// These kernels run on the host, at once, and a sum may run on another stream than theirs: they wait for all of them.
void wait(const DeviceContext& context) { wait_for_device(context.GetPlace().GetDeviceId()); }

std::vector<double> summed(const DeviceContext& context, const std::vector<double>& values) {
  DenseTensor mine, all;
  phi::DenseTensorMeta meta(DataType::FLOAT64, {static_cast<int64_t>(values.size())});
  mine.set_meta(meta);
  all.set_meta(meta);
  std::copy(values.begin(), values.end(), context.Alloc<double>(&mine));
  sum_over_ranks(context, mine, &all);
  wait(context);
  const double* found = all.data<double>();
  return {found, found + values.size()};
}

std::vector<int64_t> numbers(const DenseTensor& labels) {
  std::vector<int64_t> found(static_cast<size_t>(labels.numel()));
  for (size_t i = 0; i < found.size(); ++i)
    found[i] = labels.dtype() == DataType::INT32 ? labels.data<int32_t>()[i] : labels.data<int64_t>()[i];
  return found;
}

void cross_entropy(const DeviceContext& context, const DenseTensor& logits, const DenseTensor& labels, int64_t ignored, int rank, int ranks,
                   DenseTensor* softmax, DenseTensor* loss) {
  wait(context);
  auto classes = logits.dims()[logits.dims().size() - 1], rows = logits.numel() / classes;
  auto label = numbers(labels);
  const double* z = logits.data<double>();
  double* p = context.Alloc<double>(softmax);
  // Every rank's largest score of each row, each in a place of its own: their sum is all of them.
  std::vector<double> largest(static_cast<size_t>(rows * ranks), 0.0);
  for (int64_t i = 0; i < rows; ++i) largest[i * ranks + rank] = *std::max_element(z + i * classes, z + (i + 1) * classes);
  largest = summed(context, largest);
  std::vector<double> totals(static_cast<size_t>(2 * rows), 0.0);  // of the exponentials; and the score of the row's class
  for (int64_t i = 0; i < rows; ++i) {
    double most = *std::max_element(&largest[i * ranks], &largest[i * ranks] + ranks);
    for (int64_t j = 0; j < classes; ++j) totals[i] += p[i * classes + j] = std::exp(z[i * classes + j] - most);
    int64_t column = label[i] - rank * classes;
    if (column >= 0 && column < classes) totals[rows + i] = z[i * classes + column] - most;
  }
  totals = summed(context, totals);
  double* losses = context.Alloc<double>(loss);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < classes; ++j) p[i * classes + j] /= totals[i];
    losses[i] = label[i] == ignored ? 0.0 : std::log(totals[i]) - totals[rows + i];
  }
}
void cross_entropy_gradient(const DeviceContext& context, const DenseTensor& softmax, const DenseTensor& labels, const DenseTensor& of_loss,
                            int64_t ignored, int rank, int, DenseTensor* gradient) {
  wait(context);
  auto classes = softmax.dims()[softmax.dims().size() - 1], rows = softmax.numel() / classes;
  auto label = numbers(labels);
  const double *p = softmax.data<double>(), *each = of_loss.data<double>();
  double* to = context.Alloc<double>(gradient);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < classes; ++j)
      to[i * classes + j] = label[i] == ignored ? 0.0 : (p[i * classes + j] - (label[i] == rank * classes + j)) * each[i];
}

void embedding(const DeviceContext& context, const DenseTensor& weight, const DenseTensor& words, int64_t first, int64_t, DenseTensor* out) {
  wait(context);
  auto rows = weight.dims()[0], width = weight.dims()[1];
  auto word = numbers(words);
  const double* from = weight.data<double>();
  double* to = context.Alloc<double>(out);
  for (size_t i = 0; i < word.size(); ++i) {
    int64_t row = word[i] - first;
    if (row >= 0 && row < rows) std::copy_n(from + row * width, width, to + static_cast<int64_t>(i) * width);
    else std::fill_n(to + static_cast<int64_t>(i) * width, width, 0.0);
  }
}
void embedding_gradient(const DeviceContext& context, const DenseTensor& weight, const DenseTensor& words, const DenseTensor& of_out,
                        int64_t first, DenseTensor* gradient) {
  wait(context);
  auto rows = weight.dims()[0], width = weight.dims()[1];
  auto word = numbers(words);
  const double* from = of_out.data<double>();
  double* to = context.Alloc<double>(gradient);
  std::fill_n(to, rows * width, 0.0);
  for (size_t i = 0; i < word.size(); ++i) {
    int64_t row = word[i] - first;
    if (row < 0 || row >= rows) continue;
    for (int64_t j = 0; j < width; ++j) to[row * width + j] += from[static_cast<int64_t>(i) * width + j];
  }
}

// Like Paddle's own in float32, but for the type and the function.
void add(const char* name, phi::Backend backend, size_t attributes, void* function) {
  auto& kernels = phi::KernelFactory::Instance().kernels()[name];
  auto found = kernels.find(phi::KernelKey(phi::Backend::CUSTOM, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT32));
  if (found == kernels.end()) return;
  phi::Kernel like = found->second;
  if (like.args_def().attribute_defs().size() != attributes) fail(std::string(name) + " takes other attributes in this Paddle");
  phi::Kernel made([](phi::KernelContext*) { std::abort(); }, function);  // no executor asks for it
  *made.mutable_args_def() = like.args_def();
  for (auto& def : made.mutable_args_def()->input_defs())
    if (def.dtype == DataType::FLOAT32) def.dtype = DataType::FLOAT64;
  for (auto& def : made.mutable_args_def()->output_defs()) def.dtype = DataType::FLOAT64;
  kernels[phi::KernelKey(backend, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT64)] = made;
}

}  // namespace

void add_classes_kernels(phi::Backend backend) {
  auto& kernels = phi::KernelFactory::Instance().kernels()["mp_allreduce_sum"];
  auto found = kernels.find(phi::KernelKey(phi::Backend::CUSTOM, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT64));
  if (found == kernels.end()) return;
  sum_over_ranks = found->second.GetVariadicKernelFn<Summing>();
  add("c_softmax_with_cross_entropy", backend, 3, reinterpret_cast<void*>(cross_entropy));
  add("c_softmax_with_cross_entropy_grad", backend, 3, reinterpret_cast<void*>(cross_entropy_gradient));
  add("c_embedding", backend, 2, reinterpret_cast<void*>(embedding));
  add("c_embedding_grad", backend, 1, reinterpret_cast<void*>(embedding_gradient));
}

}  // namespace sim
