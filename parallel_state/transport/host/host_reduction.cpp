#include "lockstep/parallel_state/host_reduction.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/host_chunks.h"

namespace lockstep {
namespace {

/// One reduction, as one rank sees it, in chunks of its own slice.
struct SliceTask {
  HostTransfers& transfers;
  const HostSlices& slices;
  const int rank, size;
  const int64_t chunk;  ///< elements; the same on all ranks

  int64_t numel() const { return slices.numel_of(rank); }
  int64_t chunks() const { return ceil_div(numel(), chunk); }
  int64_t numel_of_chunk(int64_t c) const { return std::min(chunk, numel() - c * chunk); }
  int64_t bytes_of_slice(int owner) const { return slices.numel_of(owner) * slices.item; }
  std::byte* slice_of(int owner) const { return slices.at(slices.begin(owner)); }
  std::byte* sums(int64_t c) const { return bytes_of(slices.output) + c * chunk * slices.item; }

  template <class Call>
  void for_peers(Call call) const {
    for (int step = 1; step < size; ++step) call((rank + step) % size);
  }
};

/// How the peers' terms for this rank's slice arrive, and how its sums are sent to them.
class SliceTransport {
 public:
  virtual ~SliceTransport() = default;
  /// Called before the first chunk.
  virtual void begin() = 0;
  /// Chunk `c` of `peer`; valid until added(c).
  virtual const std::byte* term(int64_t c, int peer) = 0;
  /// Called when the sums of chunk `c` are complete.
  virtual void added(int64_t c) = 0;
  /// Called after the last chunk.
  virtual void end() = 0;
};

/// This rank sends each peer its slice, chunk by chunk, and each chunk of sums to all peers.
class SentSlices : public SliceTransport {
 public:
  explicit SentSlices(const SliceTask& task)
      : task_(task),
        messages_(task.transfers.messages()),
        scratch_(messages_.reserve(host_scratch_bytes(task.numel(), task.size, task.slices.item))),
        arriving_(static_cast<size_t>(task.chunks() * task.size)) {}

  void begin() override {
    for (int64_t c = 0; c < kHostChunksAhead; ++c) expect(c);
    task_.for_peers([&](int peer) { exchange_slice_of(peer); });
  }

  const std::byte* term(int64_t c, int peer) override {
    messages_.wait(message(c, peer));
    return slot(c, peer);
  }

  void added(int64_t c) override {
    const int64_t bytes = task_.numel_of_chunk(c) * task_.slices.item;
    if (task_.slices.gather)
      task_.for_peers([&](int peer) { messages_.send(task_.sums(c), bytes, peer, 1); });
    expect(c + kHostChunksAhead);
  }

  void end() override {}

 private:
  /// Where chunk `c` of `peer` arrives. The slot is reused kHostChunksAhead chunks later.
  std::byte* slot(int64_t c, int peer) const {
    const int64_t row =
        c % kHostChunksAhead * (task_.size - 1) + (peer < task_.rank ? peer : peer - 1);
    return scratch_ + row * task_.chunk * task_.slices.item;
  }

  HostMessages::Message& message(int64_t c, int peer) {
    return arriving_[static_cast<size_t>(c * task_.size + peer)];
  }

  void expect(int64_t c) {
    if (c >= task_.chunks()) return;
    const int64_t bytes = task_.numel_of_chunk(c) * task_.slices.item;
    task_.for_peers(
        [&](int peer) { message(c, peer) = messages_.receive(slot(c, peer), bytes, peer); });
  }

  /// The sums arrive where the terms were sent from: the peer has read a chunk before it answers.
  void exchange_slice_of(int peer) {
    const HostSlices& slices = task_.slices;
    const int64_t end = slices.end(peer);
    for (int64_t at = slices.begin(peer); at < end; at += task_.chunk) {
      const int64_t bytes = std::min(task_.chunk, end - at) * slices.item;
      messages_.send(slices.at(at), bytes, peer);
      if (slices.gather) messages_.receive(slices.at(at), bytes, peer, 1);
    }
  }

  const SliceTask& task_;
  HostMessages& messages_;
  std::byte* const scratch_;
  std::vector<HostMessages::Message> arriving_;
};

/// This rank reads its slice of each peer, chunk by chunk, then the slices of sums. A peer has read
/// all of its slice here before it sends its sums, which arrive at the same place.
class ReadSlices : public SliceTransport {
 public:
  explicit ReadSlices(const SliceTask& task)
      : task_(task),
        scratch_(task.transfers.messages().reserve(
            direct_scratch_bytes(task.numel(), task.size, task.slices.item))),
        sources_(static_cast<size_t>(task.size)) {}

  void begin() override {
    task_.for_peers([&](int peer) {
      source(peer) = &task_.transfers.expect(task_.bytes_of_slice(task_.rank), peer);
      task_.transfers.offer(task_.slice_of(peer), task_.bytes_of_slice(peer), peer);
    });
  }

  const std::byte* term(int64_t c, int peer) override {
    std::byte* const slot = scratch_ + peer * slot_bytes();
    task_.transfers.read(*source(peer), c * chunk_bytes(),
                         task_.numel_of_chunk(c) * task_.slices.item, slot);
    return slot;
  }

  void added(int64_t /*c*/) override {}

  void end() override {
    task_.for_peers([&](int peer) { task_.transfers.release(*source(peer)); });
    if (!task_.slices.gather) return;
    task_.for_peers([&](int peer) {
      task_.transfers.receive(task_.slice_of(peer), task_.bytes_of_slice(peer), peer, 1);
      task_.transfers.send(task_.sums(0), task_.bytes_of_slice(task_.rank), peer, 1);
    });
  }

 private:
  int64_t chunk_bytes() const { return task_.chunk * task_.slices.item; }
  int64_t slot_bytes() const { return std::min(task_.chunk, task_.numel()) * task_.slices.item; }
  HostTransfers::Source*& source(int peer) { return sources_[static_cast<size_t>(peer)]; }

  const SliceTask& task_;
  std::byte* const scratch_;
  std::vector<HostTransfers::Source*> sources_;
};

void add_chunks(const SliceTask& task, const HostReduction& reduction, SliceTransport& transport) {
  std::vector<const void*> terms(static_cast<size_t>(task.size));
  transport.begin();
  for (int64_t c = 0; c < task.chunks(); ++c) {
    for (int rank = 0; rank < task.size; ++rank)
      terms[static_cast<size_t>(rank)] =
          rank == task.rank ? task.slices.at(task.slices.begin(rank) + c * task.chunk)
                            : transport.term(c, rank);
    reduce_in_order(task.slices.type, reduction, task.sums(c), terms.data(), task.size,
                    task.numel_of_chunk(c));
    transport.added(c);
  }
  transport.end();
}

}  // namespace

std::optional<HostType> host_type(at::ScalarType dtype) {
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
      return {};
  }
}

HostSlices::HostSlices(const at::Tensor& whole, int64_t slice_length)
    : input(whole.view(-1)),
      type(host_type(whole.scalar_type()).value()),
      length(slice_length),
      numel(whole.numel()),
      item(whole.element_size()) {}

void reduce_slices(HostTransfers& transfers, const HostSlices& slices,
                   const HostReduction& reduction, int rank, int size) {
  const bool direct = transfers.direct();
  const int64_t bytes =
      direct ? direct_chunk_bytes(slices.item) : host_chunk_bytes(size, slices.item);
  const SliceTask task{transfers, slices, rank, size, bytes / slices.item};
  if (direct) {
    ReadSlices transport(task);
    add_chunks(task, reduction, transport);
  } else {
    SentSlices transport(task);
    add_chunks(task, reduction, transport);
  }
}

}  // namespace lockstep
