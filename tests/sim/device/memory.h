// The device's memory: the host's, counted, and limited where SIM_MEMORY says so; and the copies to, from and within it.
#pragma once

#include "paddle/phi/backends/device_ext.h"

namespace sim {

void install_memory(C_DeviceInterface* interface);

}  // namespace sim
