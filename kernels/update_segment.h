#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// The elements [start, end) of the flat tensors, which an update changes.
struct UpdateSegment {
  int64_t start = 0;
  int64_t end = 0;
};

/// Segments, in order and not empty. Copies share one list and what a device's kernels derived from
/// it, so that it is uploaded once and not in every step. For use by one thread.
class UpdateSegments {
 public:
  UpdateSegments() = default;
  UpdateSegments(std::vector<UpdateSegment> list)
      : shared_(std::make_shared<Shared>(Shared{std::move(list), {}})) {}
  UpdateSegments(std::initializer_list<UpdateSegment> list)
      : UpdateSegments(std::vector<UpdateSegment>(list)) {}

  bool empty() const { return list().empty(); }
  size_t size() const { return list().size(); }
  auto begin() const { return list().begin(); }
  auto end() const { return list().end(); }
  const UpdateSegment& front() const { return list().front(); }
  const UpdateSegment& back() const { return list().back(); }
  const UpdateSegment& operator[](size_t i) const { return list()[i]; }

  /// For kernels: the result of make(segments, device) in the first call with that device. Not for
  /// an empty list.
  template <class Make>
  const at::Tensor& table_on(c10::Device device, Make make) const {
    at::Tensor& table = shared_->table;
    if (!table.defined() || table.device() != device) table = make(list(), device);
    return table;
  }

 private:
  struct Shared {
    std::vector<UpdateSegment> list;
    at::Tensor table;  ///< in the form that a device's kernels read
  };
  const std::vector<UpdateSegment>& list() const {
    static const std::vector<UpdateSegment> none;
    return shared_ ? shared_->list : none;
  }

  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep::kernels
