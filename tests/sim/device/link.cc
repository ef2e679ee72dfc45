#include "link.h"

#include <algorithm>
#include <mutex>
#include <thread>

#include "faults.h"
#include "settings.h"

namespace sim {

namespace {
Clock::duration of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
}  // namespace

void carry(size_t sent, size_t received, Clock::time_point begun) {
  static const double bandwidth = setting("SIM_BANDWIDTH", 0), latency = setting("SIM_LATENCY", 0);
  static std::mutex lock;
  static Clock::time_point free_at[2]{};  // of each direction: while one message is on its way, another waits
  double stalled = link_stall();
  if (bandwidth <= 0 && latency <= 0 && stalled <= 0) return;
  Clock::time_point end = begun;
  {
    std::lock_guard<std::mutex> held(lock);
    const size_t sizes[2] = {sent, received};
    for (int way = 0; way < 2; ++way) {
      if (!sizes[way]) continue;
      double busy = stalled + (bandwidth > 0 ? static_cast<double>(sizes[way]) / bandwidth : 0);
      free_at[way] = std::max(free_at[way], begun) + of(busy);
      end = std::max(end, free_at[way]);
    }
  }
  std::this_thread::sleep_until(end + of(latency));
}

}  // namespace sim
