// Embedding and cross-entropy over cut classes, in float64: Paddle has them for every custom device, but not in float64,
// in which a proof computes.
#pragma once

#include "paddle/phi/common/backend.h"

namespace sim {

void add_classes_kernels(phi::Backend backend);

}  // namespace sim
