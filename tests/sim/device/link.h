// The link of this process: SIM_BANDWIDTH bytes a second in each direction (0: no limit), SIM_LATENCY seconds a message.
// All communicators share it. It waits by sleeping, so it takes no core: what computes meanwhile is really hidden.
#pragma once

#include <chrono>
#include <cstddef>

namespace sim {

using Clock = std::chrono::steady_clock;

void carry(size_t bytes, Clock::time_point begun);  // returns when the link has carried so much, begun then

}  // namespace sim
