#include "waits.h"

#include <atomic>
#include <cstdint>

namespace sim {

namespace {
std::atomic<uint64_t> counts[4];
std::atomic<void (*)(int)> listener{nullptr};
thread_local int uncounted = 0;
}  // namespace

void count_wait(Wait what) {
  if (uncounted) return;
  int index = static_cast<int>(what);
  ++counts[index];
  if (auto* told = listener.load()) told(index);
}

Uncounted::Uncounted() { ++uncounted; }
Uncounted::~Uncounted() { --uncounted; }

}  // namespace sim

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED uint64_t sim_waits(int what) { return sim::counts[what]; }
EXPORTED void sim_listen(void (*told)(int)) { sim::listener = told; }
