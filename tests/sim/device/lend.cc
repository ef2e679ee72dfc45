#include "lend.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "classes.h"
#include "faults.h"
#include "own_kernels.h"
#include "paddle/phi/common/backend.h"
#include "paddle/phi/core/kernel_context.h"
#include "paddle/phi/core/kernel_factory.h"
#include "settings.h"
#include "slots.h"

namespace sim {

namespace {

using phi::DataType;
using phi::DenseTensor;
using Inputs = std::vector<const DenseTensor*>;
using Outputs = std::vector<DenseTensor*>;
using AnyInputs = std::vector<const phi::TensorBase*>;

enum class Kind { kOne, kOptional, kSeveral, kOptionalSeveral, kSeveralOfAnyKind };

struct Lent {
  std::string name;
  void* function = nullptr;  // as the eager API calls it: context, inputs, attributes, outputs
  phi::Kernel kernel;        // as an executor calls it
  std::vector<Kind> inputs, outputs;
  std::vector<DataType> made;         // the types that the kernel says its outputs have
  size_t first_output = 0;            // among the words that are not floating-point
  int master = -1;                    // which input of an optimizer is its parameter's master
  DataType narrow = DataType::UNDEFINED;  // the 16-bit type that this float32 kernel stands in for
};
std::array<Lent, kSlots>& lent = *new std::array<Lent, kSlots>;
int used = 0;

const DenseTensor* optional_one(Word given) { return reinterpret_cast<const paddle::optional<DenseTensor>*>(given)->get_ptr(); }

void show_input(Call* call, Kind kind, Word given) {
  if (kind == Kind::kOne) call->show_input(reinterpret_cast<const DenseTensor*>(given));
  if (kind == Kind::kOptional && *reinterpret_cast<const paddle::optional<DenseTensor>*>(given)) call->show_input(optional_one(given));
  if (kind == Kind::kSeveral)
    for (auto* one : *reinterpret_cast<const Inputs*>(given)) call->show_input(one);
  if (kind == Kind::kSeveralOfAnyKind)
    for (auto* one : *reinterpret_cast<const AnyInputs*>(given))
      if (DenseTensor::classof(one)) call->show_input(static_cast<const DenseTensor*>(one));
  if (kind == Kind::kOptionalSeveral)
    if (auto& several = *reinterpret_cast<const paddle::optional<Inputs>*>(given))
      for (auto* one : *several) call->show_input(one);
}

void finish(const Lent& kernel, Call* call) {
  call->take_back();
  if (!flips_bits()) return;
  int bit = bit_to_flip(kernel.name);
  if (bit >= 0) call->flip(bit);
}

}  // namespace

void run(int slot, Arguments arguments) {
  const Lent& kernel = lent[slot];
  Call call(*reinterpret_cast<const phi::DeviceContext*>(arguments.word(0)), kernel.narrow);
  for (size_t i = 0; i < kernel.inputs.size(); ++i) show_input(&call, kernel.inputs[i], arguments.word(1 + i));
  for (size_t i = 0; i < kernel.outputs.size(); ++i) {
    Word given = arguments.word(kernel.first_output + i);
    if (kernel.outputs[i] == Kind::kOne) call.show_output(reinterpret_cast<DenseTensor*>(given), kernel.made[i]);
    else
      for (auto* one : *reinterpret_cast<const Outputs*>(given)) call.show_output(one, kernel.made[i]);
  }
  if (kernel.narrow != DataType::UNDEFINED && kernel.master >= 0) {
    Word given = arguments.word(1 + static_cast<size_t>(kernel.master));
    if (*reinterpret_cast<const paddle::optional<DenseTensor>*>(given))
      call.use_master(reinterpret_cast<DenseTensor*>(arguments.word(1)), optional_one(given));
  }
  arguments.registers[0] = reinterpret_cast<Word>(call.context());
  try {
    sim::call(kernel.function, arguments);
  } catch (...) {
    call.take_back();
    throw;
  }
  finish(kernel, &call);
}

void run_in(int slot, phi::KernelContext* context) {
  const Lent& kernel = lent[slot];
  auto& device = const_cast<phi::DeviceContext&>(context->GetDeviceContext<phi::DeviceContext>());
  Call call(device, kernel.narrow);
  for (size_t i = 0; i < context->InputsSize(); ++i)
    call.show_input(static_cast<const DenseTensor*>(context->MutableInputAt(i)));
  for (size_t i = 0; i < kernel.made.size(); ++i) {
    auto range = context->OutputRangeAt(i);
    for (int at = range.first; at < range.second; ++at)
      call.show_output(static_cast<DenseTensor*>(context->MutableOutputAt(static_cast<size_t>(at))), kernel.made[i]);
  }
  context->SetDeviceContext(call.context());
  try {
    kernel.kernel(context);
  } catch (...) {
    context->SetDeviceContext(&device);
    call.take_back();
    throw;
  }
  context->SetDeviceContext(&device);
  finish(kernel, &call);
}

namespace {

// Whether the kernel can be lent, and where its tensors are among the words of a call.
bool describe(const phi::Kernel& kernel, Lent* to) {
  auto& args = kernel.args_def();
  for (auto& def : args.input_defs()) {
    if (def.type_index == typeid(DenseTensor)) to->inputs.push_back(Kind::kOne);
    else if (def.type_index == typeid(paddle::optional<DenseTensor>)) to->inputs.push_back(Kind::kOptional);
    else if (def.type_index == typeid(Inputs)) to->inputs.push_back(Kind::kSeveral);
    else if (def.type_index == typeid(paddle::optional<Inputs>)) to->inputs.push_back(Kind::kOptionalSeveral);
    else if (def.type_index == typeid(AnyInputs)) to->inputs.push_back(Kind::kSeveralOfAnyKind);
    else return false;
  }
  size_t words = 0, floats = 0;
  for (auto& def : args.attribute_defs()) {
    bool floating = def.type_index == phi::AttributeType::FLOAT32 || def.type_index == phi::AttributeType::FLOAT64;
    ++(floating ? floats : words);
  }
  for (auto& def : args.output_defs()) {
    if (def.type_index == typeid(DenseTensor*)) to->outputs.push_back(Kind::kOne);
    else if (def.type_index == typeid(Outputs)) to->outputs.push_back(Kind::kSeveral);
    else return false;
    to->made.push_back(def.dtype);
  }
  to->first_output = 1 + to->inputs.size() + words;
  return floats <= kFloats && to->first_output + to->outputs.size() <= kRegisters + kStack;
}

// The optimizers end their inputs with the master parameter, or with it and `skip_update`.
constexpr struct {
  const char* name;
  int from_the_end;
} kMasters[] = {{"sgd", 1}, {"momentum", 1}, {"adam", 2}, {"adamw", 2}, {"lamb", 2}};
int master_of(const std::string& name, const Lent& kernel) {
  for (auto& one : kMasters)
    if (name == one.name) return static_cast<int>(kernel.inputs.size()) - one.from_the_end;
  return -1;
}
bool is_optimizer(const std::string& name) {
  for (auto& one : kMasters)
    if (name == one.name) return true;
  return false;
}

bool is_lent(DataType type) {
  for (auto one : {DataType::BOOL, DataType::UINT8, DataType::INT8, DataType::INT16, DataType::INT32, DataType::INT64, DataType::FLOAT16,
                   DataType::BFLOAT16, DataType::FLOAT32, DataType::FLOAT64, DataType::UNDEFINED, DataType::ALL_DTYPE})
    if (type == one) return true;
  return false;
}

using Kernels = phi::KernelKeyMap;

void lend(const std::string& name, const phi::KernelKey& key, const phi::Kernel& kernel, phi::Backend backend, DataType narrow, Kernels* to) {
  Lent one;
  if (!describe(kernel, &one)) return;
  if (used == kSlots) fail("Paddle has more CPU kernels than the device has slots: raise kSlots in slots.h");
  one.name = name;
  one.function = reinterpret_cast<void*>(kernel.GetVariadicKernelFn<void (*)()>());
  one.kernel = kernel;
  one.narrow = narrow == DataType::UNDEFINED && key.dtype() == DataType::FLOAT32 ? mixed_in(name) : narrow;
  one.master = master_of(name, one);
  if (auto* other = function_instead(name, key.dtype())) one.function = other;  // no executor asks for these
  Slot stand = slot(used);
  phi::Kernel made(stand.in_context, stand.function);
  *made.mutable_args_def() = kernel.args_def();
  auto adapt = [&](auto& defs) {
    for (auto& def : defs) {
      if (def.backend == phi::Backend::CPU) def.backend = backend;
      if (narrow != DataType::UNDEFINED && def.dtype == DataType::FLOAT32) def.dtype = narrow;
    }
  };
  adapt(made.mutable_args_def()->input_defs());
  adapt(made.mutable_args_def()->output_defs());
  lent[used++] = one;
  (*to)[phi::KernelKey(backend, key.layout(), narrow == DataType::UNDEFINED ? key.dtype() : narrow)] = made;
}

// Paddle's CPU kernels of one operation; none where it has a kernel of its own for every custom device.
std::vector<std::pair<phi::KernelKey, phi::Kernel>> of_cpu(const Kernels& kernels) {
  std::vector<std::pair<phi::KernelKey, phi::Kernel>> found;
  for (auto& [key, kernel] : kernels) {
    if (key.backend() == phi::Backend::CUSTOM) return {};
    if (key.backend() != phi::Backend::CPU || !is_lent(key.dtype()) || !kernel.IsValid()) continue;
    if (kernel.GetKernelRegisteredType() == phi::KernelRegisteredType::FUNCTION) found.emplace_back(key, kernel);
  }
  return found;
}

// A kernel that the wheel for CPUs does not name at all: it takes two tensors and makes one, as relu_grad does.
void lend_causal_softmax_gradient(phi::Backend backend) {
  auto& all = phi::KernelFactory::Instance().kernels();
  auto like = of_cpu(all["relu_grad"]);
  const std::string name = "fused_softmax_mask_upper_triangle_grad";
  for (auto& [key, kernel] : like) {
    if (!function_instead(name, key.dtype())) continue;
    lend(name, key, kernel, backend, DataType::UNDEFINED, &all[name]);
    if (key.dtype() == DataType::FLOAT32)
      for (auto narrow : {DataType::FLOAT16, DataType::BFLOAT16}) lend(name, key, kernel, backend, narrow, &all[name]);
  }
}

}  // namespace

int lend_kernels(const char* device_type) {
  auto backend = paddle::experimental::StringToBackend(device_type);
  for (auto& [name, kernels] : phi::KernelFactory::Instance().kernels()) {
    auto found = of_cpu(kernels);
    for (auto& [key, kernel] : found) lend(name, key, kernel, backend, DataType::UNDEFINED, &kernels);
    for (auto& [key, kernel] : found) {
      if (key.dtype() != DataType::FLOAT32) continue;
      for (auto narrow : {DataType::FLOAT16, DataType::BFLOAT16})
        if (!kernels.count(phi::KernelKey(backend, key.layout(), narrow)) || adds_up(name) || is_optimizer(name))
          lend(name, key, kernel, backend, narrow, &kernels);
    }
  }
  lend_causal_softmax_gradient(backend);
  add_missing_types(backend);
  add_classes_kernels(backend);
  return used;
}

}  // namespace sim
