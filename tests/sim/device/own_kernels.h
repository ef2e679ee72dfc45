// The few kernels that the device has of its own, where the CPU's would not do what a device's does.
#pragma once

#include <string>

#include "paddle/phi/common/backend.h"
#include "paddle/phi/common/data_type.h"

namespace sim {

void* function_instead(const std::string& kernel, phi::DataType type);  // of a CPU kernel's function, or null
bool adds_up(const std::string& kernel);  // whether its 16-bit CPU kernel would add up in 16 bits
// The 16-bit type of which a float32 kernel may be given tensors, or UNDEFINED.
phi::DataType mixed_in(const std::string& kernel);
void add_missing_types(phi::Backend backend);  // of kernels that Paddle has for every custom device

}  // namespace sim
