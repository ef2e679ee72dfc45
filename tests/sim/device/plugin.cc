// What Paddle calls when it loads the device.
#include <cstdio>
#include <cstring>

#include "collectives.h"
#include "lend.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace sim {

namespace {

thread_local int current_device = 0;

C_Status nothing() { return C_SUCCESS; }
C_Status nothing_to(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) {
  current_device = device->id;
  return C_SUCCESS;
}
C_Status get_device(const C_Device device) {
  device->id = current_device;
  return C_SUCCESS;
}
size_t devices() { return static_cast<size_t>(setting("SIM_DEVICES", 8)); }
C_Status count_devices(size_t* count) {
  *count = devices();
  return C_SUCCESS;
}
C_Status list_devices(size_t* list) {
  for (size_t i = 0; i < devices(); ++i) list[i] = i;
  return C_SUCCESS;
}
C_Status supported(const C_Device, bool* answer) {
  *answer = true;
  return C_SUCCESS;
}
C_Status version(const C_Device, size_t* answer) {
  *answer = 1;
  return C_SUCCESS;
}

C_Status profiler_begin(C_Profiler, void**) { return C_SUCCESS; }
C_Status profiler_step(C_Profiler, void*) { return C_SUCCESS; }
C_Status profiler_collect(C_Profiler, uint64_t, void*) { return C_SUCCESS; }

void install(C_DeviceInterface* to) {
  std::memset(to, 0, sizeof *to);
  to->size = sizeof *to;
  to->initialize = to->finalize = nothing;
  to->init_device = to->set_device = set_device;
  to->get_device = get_device;
  to->deinit_device = nothing_to;
  to->get_device_count = count_devices;
  to->get_device_list = list_devices;
  to->is_float16_supported = to->is_bfloat16_supported = supported;
  to->get_compute_capability = to->get_runtime_version = to->get_driver_version = version;
  to->profiler_initialize = profiler_begin;
  to->profiler_finalize = to->profiler_prepare_tracing = to->profiler_start_tracing = to->profiler_stop_tracing = profiler_step;
  to->profiler_collect_trace_data = profiler_collect;
  install_streams(to);
  install_memory(to);
  install_collectives(to);
}

}  // namespace

}  // namespace sim

extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  static char type[32] = "sim", sub[] = "1";
  // Paddle treats some types of device apart, by name: bfloat16 autocast is for npu, metax_gpu and two more.
  if (auto name = sim::words("SIM_NAME"); !name.empty()) std::snprintf(type, sizeof type, "%s", name.c_str());
  params->device_type = type;
  params->sub_device_type = sub;
  if (sim::setting("SIM_KERNELS", 1) > 0) {
    int lent = sim::lend_kernels(type);
    if (sim::setting("SIM_VERBOSE", 0) > 0) std::fprintf(stderr, "sim: %d kernels lent\n", lent);
  }
  sim::install(params->interface);
}
