// Functions that stand for kernels. Paddle calls a kernel as a function of its own signature; a slot takes and hands on as
// many arguments as any kernel has, so one kind of function stands for all of them, and a slot knows its number.
//
// On x86-64 (System V) an argument of a kernel is a word, in an integer register or on the stack, or a floating-point
// number in a vector register: contexts, tensors and attributes are passed by reference, numbers and enumerations by value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#error "the slots know the calling convention of x86-64 only"
#endif

namespace phi {
class KernelContext;
}

namespace sim {

using Word = intptr_t;
constexpr size_t kRegisters = 6, kFloats = 8, kStack = 48;
constexpr int kSlots = 6000;

struct Stack {  // by value: it lies where the words lie that no register holds
  Word words[kStack];
};
struct Arguments {
  std::array<Word, kRegisters> registers;
  std::array<double, kFloats> floats;
  const Stack* stack;

  Word word(size_t at) const { return at < kRegisters ? registers[at] : stack->words[at - kRegisters]; }
};

struct Slot {
  void* function;                        // as the eager API calls a kernel
  void (*in_context)(phi::KernelContext*);  // as an executor does
};
Slot slot(int number);

void call(void* function, const Arguments& arguments);  // a kernel's function, with what a slot was given

// What the slots call; defined in lend.cc.
void run(int slot, Arguments arguments);
void run_in(int slot, phi::KernelContext* context);

}  // namespace sim
