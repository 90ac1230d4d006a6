#pragma once

#include <functional>
#include <memory>

#include <c10/core/Event.h>

#include "lockstep/kernels/device_graph.h"
#include "lockstep/tests/device/lagging_tests.h"

namespace lockstep::testing {

using Graph = std::unique_ptr<kernels::DeviceGraph>;

inline Graph new_graph() { return kernels::make_device_graph(c10::DeviceType::PrivateUse1); }

/// Captures what `body` launches on a new stream of the device.
inline Graph captured(int device, const std::function<void()>& body) {
  const c10::DeviceGuard on_device(lagging_device(device));
  const c10::StreamGuard on_stream(new_stream(static_cast<c10::DeviceIndex>(device)));
  Graph graph = new_graph();
  graph->begin_capture();
  body();
  graph->end_capture();
  return graph;
}

/// `stream` waits for the work that `other` has so far.
inline void come_behind(const c10::Stream& stream, const c10::Stream& other) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(other);
  event.block(stream);
}

/// Different numbers for each seed.
inline at::Tensor numbers_of(uint64_t seed, at::IntArrayRef sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  const at::Tensor i = at::arange(count, at::kDouble) + static_cast<double>(seed) * 0.7;
  return at::sin(i * 1.3).to(at::kFloat).view(sizes);
}

}  // namespace lockstep::testing
