#include "call.h"

#include <cstdlib>
#include <cstring>

#include "half.h"
#include "paddle/phi/backends/context_pool.h"
#include "settings.h"

namespace sim {

using phi::DenseTensor;

namespace {

// The device's memory, shown as the host's.
class Shown : public phi::Allocation {
 public:
  explicit Shown(Holder own) : phi::Allocation(own->ptr(), own->size(), phi::CPUPlace()), own(std::move(own)) {}
  const Holder own;
};

// Host memory for a tensor in float32. It does not count as the device's: a real 16-bit kernel needs none.
class Room : public phi::Allocation {
 public:
  explicit Room(size_t size) : phi::Allocation(std::aligned_alloc(64, (size + 127) / 64 * 64), size, phi::CPUPlace()) {}
  ~Room() override { std::free(ptr()); }
};

// What a kernel gets for an input whose numbers it does not need: Paddle gives their memory up, on an NPU also where the
// CPU's kernel asks for it. Whoever reads it after all gets NaN in every floating-point type.
Holder given_up(const DenseTensor& tensor) {
  size_t size = static_cast<size_t>(tensor.numel()) * sizeof(double);
  auto room = std::make_shared<Room>(size);
  std::memset(room->ptr(), 0xff, size);
  return room;
}

void put(DenseTensor* tensor, const Holder& holder, size_t offset) {
  tensor->clear();
  tensor->ResetHolder(holder);
  const_cast<phi::DenseTensorMeta&>(tensor->meta()).offset = offset;
}
void put(DenseTensor* tensor, const Holder& holder) { put(tensor, holder, tensor->meta().offset); }

void restore(DenseTensor* tensor) {
  Holder holder = tensor->Holder();
  if (auto* shown = dynamic_cast<Shown*>(holder.get())) put(tensor, shown->own);
}

void set_type(DenseTensor* tensor, phi::DataType type) { const_cast<phi::DenseTensorMeta&>(tensor->meta()).dtype = type; }

// How many elements lie between a tensor's first and last: more than it has, where it is a view with strides.
size_t span(const DenseTensor& tensor) {
  auto dims = tensor.dims(), strides = tensor.strides();
  if (dims.size() != strides.size()) return static_cast<size_t>(tensor.numel());
  int64_t last = 0;
  for (int i = 0; i < dims.size(); ++i) {
    if (dims[i] == 0) return 0;
    last += (dims[i] - 1) * strides[i];
  }
  return static_cast<size_t>(last) + 1;
}

void widen(float* to, const uint16_t* from, size_t count, phi::DataType type) {
  if (type == phi::DataType::BFLOAT16)
    for (size_t i = 0; i < count; ++i) to[i] = from_bfloat16(from[i]);
  else
    for (size_t i = 0; i < count; ++i) to[i] = from_float16(from[i]);
}
void narrow(uint16_t* to, const float* from, size_t count, phi::DataType type) {
  if (type == phi::DataType::BFLOAT16)
    for (size_t i = 0; i < count; ++i) to[i] = to_bfloat16(from[i]);
  else
    for (size_t i = 0; i < count; ++i) to[i] = to_float16(from[i]);
}

}  // namespace

phi::Allocator::AllocationPtr Memory::Allocate(size_t size) {
  return AllocationPtr(new Shown(Holder(device_.Allocate(size))), [](phi::Allocation* shown) { delete shown; });
}

Call::Call(const phi::DeviceContext& device, phi::DataType narrow)
    : device_(device),
      place_(device.GetPlace()),
      narrow_(narrow),
      memory_(device.GetAllocator()),
      nothing_(device.GetZeroAllocator()),
      context_(phi::CPUPlace()) {
  device.Wait();
  auto& pool = phi::DeviceContextPool::Instance();
  auto* host = pool.Get(phi::CPUPlace());
  context_.SetAllocator(&memory_);
  context_.SetZeroAllocator(&nothing_);
  context_.SetHostAllocator(&host->GetAllocator());
  context_.SetHostZeroAllocator(&host->GetZeroAllocator());
  context_.SetGenerator(pool.Get(place_)->GetGenerator());  // an exchange's own context has none
  context_.SetHostGenerator(host->GetHostGenerator());
}

void Call::show_output(DenseTensor* tensor, phi::DataType made) { show(tensor, &made); }

void Call::show(const DenseTensor* given, phi::DataType* made) {
  auto* tensor = const_cast<DenseTensor*>(given);
  if (!tensor) return;
  bool output = made != nullptr;
  if (output) outputs_.push_back(tensor);
  for (auto& one : widened_)
    if (one.tensor == tensor) {  // an operation in place: input and output in one
      one.is_output = one.is_output || output;
      return;
    }
  if (output && narrow_ != phi::DataType::UNDEFINED && tensor->dtype() == phi::DataType::UNDEFINED && *made == phi::DataType::FLOAT32)
    set_type(tensor, narrow_);  // no rule had said what it is
  Holder holder = tensor->Holder();
  // A GPU would read the other device's memory across the bus, or fault; Paddle does not move it.
  if (holder && holder->place().GetType() == phi::AllocationType::CUSTOM && holder->place() != place_ && !output)
    fail("a kernel on " + place_.DebugString() + " was given a tensor on " + holder->place().DebugString());
  if (output && holder && holder->place() == place_ && tensor->meta().valid()) {
    size_t needed = tensor->meta().offset + static_cast<size_t>(tensor->numel()) * phi::SizeOf(tensor->dtype());
    if (needed > holder->size()) {  // left from before
      tensor->clear();
      holder = nullptr;
    }
  }
  bool is_lost = !output && holder && !holder->ptr() && tensor->numel() > 0;
  if (narrow_ != phi::DataType::UNDEFINED && tensor->dtype() == narrow_) return widen(tensor, output, is_lost);
  if (is_lost) {
    lost_.push_back({tensor, holder, tensor->meta().offset, false});
    return put(tensor, given_up(*tensor), 0);
  }
  if (!holder || holder->place() != place_) return;
  auto& shown = shown_[holder.get()];
  if (!shown) shown = std::make_shared<Shown>(holder);
  tensors_.push_back(tensor);
  put(tensor, shown);
}

void Call::widen(DenseTensor* tensor, bool is_output, bool is_lost) {
  Holder home = tensor->Holder();
  size_t offset = tensor->meta().offset;
  widened_.push_back({tensor, home, offset, is_output});
  set_type(tensor, phi::DataType::FLOAT32);
  if (is_lost) return put(tensor, given_up(*tensor), 0);
  if (home && !home->ptr()) return;  // it has none
  if (!home) {
    if (tensor->numel() > 0) put(tensor, std::make_shared<Room>(static_cast<size_t>(tensor->numel()) * sizeof(float)), 0);
    return;
  }
  auto* bits = reinterpret_cast<const uint16_t*>(static_cast<const char*>(home->ptr()) + offset);
  auto& room = wide_[bits];
  size_t count = span(*tensor);
  if (!room || room->size() < count * sizeof(float)) {
    room = std::make_shared<Room>(count * sizeof(float));
    sim::widen(static_cast<float*>(room->ptr()), bits, count, narrow_);
  }
  put(tensor, room, 0);
}

// Back to 16 bits. An input goes back to where it lies; an output is rounded into where it lay, or into new memory.
void Call::narrow(const Elsewhere& one) {
  auto* tensor = one.tensor;
  if (tensor->dtype() != phi::DataType::FLOAT32 || !one.is_output) {
    if (one.home) put(tensor, one.home, one.offset);
    else tensor->clear();
    return set_type(tensor, narrow_);
  }
  Holder wide = tensor->Holder();
  size_t count = span(*tensor);
  auto* numbers = wide ? reinterpret_cast<const float*>(static_cast<const char*>(wide->ptr()) + tensor->meta().offset) : nullptr;
  bool fits = one.home && one.home->size() >= one.offset + count * sizeof(uint16_t);
  Holder home = fits ? one.home : Holder(const_cast<phi::Allocator&>(device_.GetAllocator()).Allocate(count * sizeof(uint16_t)));
  size_t offset = fits ? one.offset : 0;
  if (numbers && count)
    sim::narrow(reinterpret_cast<uint16_t*>(static_cast<char*>(home->ptr()) + offset), numbers, count, narrow_);
  put(tensor, home, offset);
  set_type(tensor, narrow_);
}

void Call::use_master(DenseTensor* parameter, const DenseTensor* master) {
  for (auto& one : widened_)
    if (one.tensor == parameter) {
      auto found = one;
      for (auto& other : widened_)  // the output is another tensor over the same memory
        if (other.home == found.home && other.offset == found.offset) put(other.tensor, master->Holder(), master->meta().offset);
      return;
    }
}

void Call::take_back() {
  for (auto* tensor : tensors_) restore(tensor);
  for (auto& one : lost_) put(one.tensor, one.home, one.offset);
  for (auto& one : widened_) narrow(one);
  for (auto* tensor : outputs_) {
    restore(tensor);
    Holder holder = tensor->Holder();
    if (!holder || holder->place() == place_) continue;
    Holder own(const_cast<phi::Allocator&>(device_.GetAllocator()).Allocate(holder->size()));
    std::memcpy(own->ptr(), holder->ptr(), holder->size());  // some kernels take host memory past their context
    put(tensor, own);
  }
}

void Call::flip(int bit) {
  for (auto* tensor : outputs_) {
    if (!tensor->Holder() || !tensor->numel()) continue;
    auto* first = static_cast<uint8_t*>(tensor->Holder()->ptr()) + tensor->meta().offset;
    first[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    return;
  }
}

}  // namespace sim
