// What the environment chooses for the device. It is read when it is first needed, not when the device is loaded: a fork of
// a process that has loaded it may still choose.
#pragma once

#include <string>

namespace sim {

double setting(const char* name, double otherwise);
std::string words(const char* name);  // "" where it is not set
int rank();                           // of this process in its job, as the launcher says; 0 without one

// Ends the process, with a sentence on standard error. A stream has nobody to raise an exception to.
[[noreturn]] void fail(const std::string& what);

}  // namespace sim
