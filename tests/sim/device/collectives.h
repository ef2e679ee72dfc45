// The collectives of Paddle's device interface, over communicators.
#pragma once

#include "paddle/phi/backends/device_ext.h"

namespace sim {

void install_collectives(C_DeviceInterface* interface);

}  // namespace sim
