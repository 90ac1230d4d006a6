#pragma once

// Internal: c10d's Work objects as parts of an operation.

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/parallel_state/pending.h"

namespace lockstep {

/// A part that c10d carries out.
class C10dPart : public Pending {
 public:
  explicit C10dPart(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool is_completed() const override { return work_->isCompleted(); }

 protected:
  c10d::Work& work() const { return *work_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

/// A part on tensors on a device with streams: the current stream waits.
class StreamPart : public C10dPart {
 public:
  using C10dPart::C10dPart;
  void wait(const Waiting& /*waiting*/) override { wait_on_stream(); }
  void wait_on_stream();
  std::optional<std::string> failure() const override;
};

/// A collective of CPU tensors.
class CollectivePart : public C10dPart {
 public:
  using C10dPart::C10dPart;
  void wait(const Waiting& waiting) override;
};

/// A Gloo message. A timeout would leave its connection unusable, so another thread looks for
/// failures. Gloo says whether it has ended only after wait().
class MessagePart : public C10dPart {
 public:
  using C10dPart::C10dPart;
  void wait(const Waiting& waiting) override;
};

}  // namespace lockstep
