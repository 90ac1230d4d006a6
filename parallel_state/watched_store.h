#pragma once

// Internal.

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep {

/// A client of a c10d::TCPStore that knows when the process that serves it has ended: every request
/// then throws c10::DistNetworkError. libtorch's own client would write a stack of frames to
/// standard error for each.
c10::intrusive_ptr<c10d::Store> watch_store(c10::intrusive_ptr<c10d::Store> store,
                                            const std::string& host, int port);

}  // namespace lockstep
