#include "slots.h"

#include <utility>

namespace sim {

namespace {

using Raw = void (*)(Word, Word, Word, Word, Word, Word, double, double, double, double, double, double, double, double, Stack);

template <int I>
void stand(Word a, Word b, Word c, Word d, Word e, Word f, double s, double t, double u, double v, double w, double x, double y,
           double z, Stack stack) {
  run(I, {{a, b, c, d, e, f}, {s, t, u, v, w, x, y, z}, &stack});
}
template <int I>
void stand_in(phi::KernelContext* context) {
  run_in(I, context);
}

template <int... I>
constexpr std::array<Raw, kSlots> functions(std::integer_sequence<int, I...>) {
  return {stand<I>...};
}
template <int... I>
constexpr std::array<void (*)(phi::KernelContext*), kSlots> in_contexts(std::integer_sequence<int, I...>) {
  return {stand_in<I>...};
}

}  // namespace

Slot slot(int number) {
  static constexpr auto plain = functions(std::make_integer_sequence<int, kSlots>{});
  static constexpr auto contexts = in_contexts(std::make_integer_sequence<int, kSlots>{});
  return {reinterpret_cast<void*>(plain[number]), contexts[number]};
}

void call(void* function, const Arguments& given) {
  auto& r = given.registers;
  auto& f = given.floats;
  reinterpret_cast<Raw>(function)(r[0], r[1], r[2], r[3], r[4], r[5], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], *given.stack);
}

}  // namespace sim
