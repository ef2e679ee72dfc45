// How parts of several ranks are combined: in the order of the ranks, so that every rank gets the same bits.
#pragma once

#include <cstddef>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace sim {

size_t width(C_DataType type);  // bytes of one element
void reduce(void* to, const std::vector<const char*>& parts, size_t count, C_DataType type, C_CCLReduceOp op);

}  // namespace sim
