// One run of a CPU kernel over the device's tensors.
//
// The device's memory is the host's, so nothing is copied: while the call lasts, its tensors say that they lie on the CPU,
// and the kernel's context allocates from the device. What shares memory before an in-place operation shares it after;
// Paddle's own fallback to the CPU moves it, and sharded weights then train wrongly without a word.
//
// Where the CPU has no kernel for a 16-bit type, its float32 kernel stands in: inputs are widened before, outputs rounded
// after. So products add up in float32 and are rounded once, which is what a GPU's tensor cores do.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "waits.h"

namespace sim {

using Holder = std::shared_ptr<phi::Allocation>;

// Gives a kernel memory of the device, which it takes for the host's.
class Memory : public phi::Allocator {
 public:
  explicit Memory(const phi::Allocator& device) : device_(const_cast<phi::Allocator&>(device)) {}
  AllocationPtr Allocate(size_t size) override;
  bool IsAllocThreadSafe() const override { return true; }

 private:
  phi::Allocator& device_;
};

class Call {
 public:
  // `narrow`: the 16-bit type that a float32 kernel stands in for, or UNDEFINED.
  Call(const phi::DeviceContext& device, phi::DataType narrow);

  phi::DeviceContext* context() { return &context_; }
  void show_input(const phi::DenseTensor* tensor) { show(tensor, nullptr); }
  // `made` is the type that the kernel itself says its output has.
  void show_output(phi::DenseTensor* tensor, phi::DataType made);
  // An optimizer's kernel over a 16-bit parameter with a float32 master: what is computed, and kept, is the master.
  void use_master(phi::DenseTensor* parameter, const phi::DenseTensor* master);
  void take_back();  // after the kernel, also when it has raised
  void flip(int bit);  // in the first element of the first output: a fault on request

 private:
  struct Elsewhere {  // a tensor that is shown other memory than its own: a 16-bit one, in float32
    phi::DenseTensor* tensor;
    Holder home;  // where it lies; none when the kernel is to allocate it
    size_t offset;
    bool is_output;
  };

  void show(const phi::DenseTensor* tensor, phi::DataType* made);
  void widen(phi::DenseTensor* tensor, bool is_output, bool is_lost);
  void narrow(const Elsewhere& one);

  Uncounted uncounted_;
  const phi::DeviceContext& device_;
  const phi::Place place_;
  const phi::DataType narrow_;
  Memory memory_, nothing_;
  phi::CPUContext context_;
  std::map<phi::Allocation*, Holder> shown_;
  std::map<const void*, Holder> wide_;  // by where the 16 bits lie: two tensors that share memory go on sharing it
  std::vector<phi::DenseTensor*> tensors_, outputs_;
  std::vector<Elsewhere> widened_, lost_;
};

}  // namespace sim
