#include "lockstep/parallel_state/host_reduction.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/host_chunks.h"

namespace lockstep {
namespace {

HostType host_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return HostType::f32;
    case at::kDouble:
      return HostType::f64;
    case at::kBFloat16:
      return HostType::bf16;
    case at::kHalf:
      return HostType::f16;
    case at::kChar:
      return HostType::i8;
    case at::kShort:
      return HostType::i16;
    case at::kInt:
      return HostType::i32;
    case at::kLong:
      return HostType::i64;
    case at::kByte:
      return HostType::u8;
    default:
      fail<UsageError>(
          "reduction on the host: found {}, allowed: Float, Double, BFloat16, Half, Char, Short, "
          "Int, Long, Byte",
          at::toString(dtype));
  }
}

/// One reduction: this rank sends each of the others its slice, chunk by chunk, and adds up what
/// arrives for its own.
class SliceReducer {
 public:
  SliceReducer(HostMessages& messages, const HostSlices& slices, const HostReduction& reduction,
               int rank, int size)
      : messages_(messages),
        slices_(slices),
        reduction_(reduction),
        rank_(rank),
        size_(size),
        chunk_(host_chunk_bytes(size, slices.item) / slices.item),
        chunks_(ceil_div(slices.numel_of(rank), chunk_)),
        scratch_(messages.reserve(host_scratch_bytes(slices.numel_of(rank), size, slices.item))),
        arriving_(static_cast<size_t>(chunks_ * size)),
        terms_(static_cast<size_t>(size)) {}

  void run() {
    for (int64_t c = 0; c < kHostChunksAhead; ++c) expect(c);
    for_peers([&](int peer) { exchange_slice_of(peer); });
    for (int64_t c = 0; c < chunks_; ++c) {
      add(c);
      expect(c + kHostChunksAhead);
    }
  }

 private:
  template <class Call>
  void for_peers(Call call) const {
    for (int step = 1; step < size_; ++step) call((rank_ + step) % size_);
  }

  int64_t numel_of_chunk(int64_t c) const {
    return std::min(chunk_, slices_.numel_of(rank_) - c * chunk_);
  }

  /// Where chunk `c` of `peer` arrives. Used again kHostChunksAhead chunks later.
  std::byte* slot(int64_t c, int peer) const {
    const int64_t row = c % kHostChunksAhead * (size_ - 1) + (peer < rank_ ? peer : peer - 1);
    return scratch_ + row * chunk_ * slices_.item;
  }

  HostMessages::Message& message(int64_t c, int peer) {
    return arriving_[static_cast<size_t>(c * size_ + peer)];
  }

  void expect(int64_t c) {
    if (c >= chunks_) return;
    const int64_t bytes = numel_of_chunk(c) * slices_.item;
    for_peers([&](int peer) { message(c, peer) = messages_.receive(slot(c, peer), bytes, peer); });
  }

  /// The sums come back to where the terms are sent from: the peer has read a chunk before it
  /// answers.
  void exchange_slice_of(int peer) const {
    const int64_t end = slices_.end(peer);
    for (int64_t at = slices_.begin(peer); at < end; at += chunk_) {
      const int64_t bytes = std::min(chunk_, end - at) * slices_.item;
      messages_.send(slices_.at(at), bytes, peer);
      if (slices_.gather) messages_.receive(slices_.at(at), bytes, peer, 1);
    }
  }

  void add(int64_t c) {
    for_peers([&](int peer) {
      messages_.wait(message(c, peer));
      terms_[static_cast<size_t>(peer)] = slot(c, peer);
    });
    terms_[static_cast<size_t>(rank_)] = slices_.at(slices_.begin(rank_) + c * chunk_);
    std::byte* const out = bytes_of(slices_.output) + c * chunk_ * slices_.item;
    const int64_t numel = numel_of_chunk(c);
    reduce_in_order(slices_.type, reduction_, out, terms_.data(), size_, numel);
    if (slices_.gather)
      for_peers([&](int peer) { messages_.send(out, numel * slices_.item, peer, 1); });
  }

  HostMessages& messages_;
  const HostSlices& slices_;
  const HostReduction& reduction_;
  const int rank_, size_;
  const int64_t chunk_;   ///< elements; the same on all ranks
  const int64_t chunks_;  ///< of this rank's slice
  std::byte* const scratch_;
  std::vector<HostMessages::Message> arriving_;
  std::vector<const void*> terms_;
};

}  // namespace

HostSlices::HostSlices(const at::Tensor& whole, int64_t slice_length)
    : input(whole.view(-1)),
      type(host_type(whole.scalar_type())),
      length(slice_length),
      numel(whole.numel()),
      item(whole.element_size()) {}

void reduce_slices(HostMessages& messages, const HostSlices& slices, const HostReduction& reduction,
                   int rank, int size) {
  SliceReducer(messages, slices, reduction, rank, size).run();
}

}  // namespace lockstep
