#pragma once

// Internal: the parts that use_lagging_device() registers with libtorch, once.

namespace lockstep::testing {

void register_device_guard();  // and the accelerator's hooks
void register_device_operators();
void register_lagging_graphs();    // of kernels/device_graph.h
void register_lockstep_kernels();  // the kernels of kernels/

}  // namespace lockstep::testing
