#include "reduction.h"

#include "half.h"
#include "settings.h"

namespace sim {

namespace {

template <typename T>
T combined(T a, T b, C_CCLReduceOp op) {
  switch (op) {
    case MAX: return a > b ? a : b;
    case MIN: return a < b ? a : b;
    case PRODUCT: return a * b;
    default: return a + b;
  }
}

// T is what lies in memory, W what is computed in: float for the 16-bit types, which are rounded once, at the end.
template <typename T, typename W, typename In, typename Out>
void reduce_as(void* to, const std::vector<const char*>& parts, size_t count, C_CCLReduceOp op, In in, Out out) {
  for (size_t i = 0; i < count; ++i) {
    W value = in(reinterpret_cast<const T*>(parts[0])[i]);
    for (size_t p = 1; p < parts.size(); ++p) value = combined<W>(value, in(reinterpret_cast<const T*>(parts[p])[i]), op);
    if (op == AVG) value = value / static_cast<W>(parts.size());
    static_cast<T*>(to)[i] = out(value);
  }
}
template <typename T>
void reduce_plain(void* to, const std::vector<const char*>& parts, size_t count, C_CCLReduceOp op) {
  auto same = [](T value) { return value; };
  reduce_as<T, T>(to, parts, count, op, same, same);
}

}  // namespace

size_t width(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case COMPLEX128: return 16;
    default: return 8;
  }
}

void reduce(void* to, const std::vector<const char*>& parts, size_t count, C_DataType type, C_CCLReduceOp op) {
  switch (type) {
    case FLOAT32: return reduce_plain<float>(to, parts, count, op);
    case FLOAT64: return reduce_plain<double>(to, parts, count, op);
    case INT64: return reduce_plain<int64_t>(to, parts, count, op);
    case INT32: return reduce_plain<int32_t>(to, parts, count, op);
    case INT16: return reduce_plain<int16_t>(to, parts, count, op);
    case INT8: return reduce_plain<int8_t>(to, parts, count, op);
    case UINT8: case BOOL: return reduce_plain<uint8_t>(to, parts, count, op);
    case BFLOAT16: return reduce_as<uint16_t, float>(to, parts, count, op, from_bfloat16, to_bfloat16);
    case FLOAT16: return reduce_as<uint16_t, float>(to, parts, count, op, from_float16, to_float16);
    default: fail("no reduction for the data type " + std::to_string(type));
  }
}

}  // namespace sim
