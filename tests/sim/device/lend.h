// The device's kernels: Paddle's CPU kernels, lent to it.
#pragma once

namespace sim {

int lend_kernels(const char* device_type);  // returns how many

}  // namespace sim
