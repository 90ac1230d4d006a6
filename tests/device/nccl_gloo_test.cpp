#include "lockstep/tests/device/nccl_job.h"

// Every c10d call, on the backend with NCCL's rules and, with the same input on the CPU, on Gloo.

namespace lockstep::testing {
namespace {

using Put = std::function<at::Tensor(const at::Tensor&)>;

c10::intrusive_ptr<c10d::Backend> gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size) {
  BackendSpec spec;
  spec.store = store;
  spec.group_name = "gloo";
  for (int member = 0; member < size; ++member) spec.ranks.push_back(member);
  spec.rank = rank;
  spec.timeout = std::chrono::seconds(60);
  return make_gloo_backend(spec);
}

/// Makes calls on a backend and keeps their results on the host.
class Caller {
 public:
  Caller(c10d::Backend& backend, Put put, at::ScalarType dtype)
      : backend_(backend),
        put_(std::move(put)),
        dtype_(dtype),
        rank_(backend.getRank()),
        size_(backend.getSize()) {}

  void reductions() {
    for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::MAX, c10d::ReduceOp::MIN}) {
      Tensors one = {terms(13)};
      c10d::AllreduceOptions all;
      all.reduceOp = op;
      keep(backend_.allreduce(one, all), one);
      Tensors sum = {terms(7)};
      c10d::ReduceOptions to_one;
      to_one.reduceOp = op;
      to_one.rootRank = size_ - 1;
      const WorkPtr work = backend_.reduce(sum, to_one);
      keep(work, rank_ == size_ - 1 ? sum : Tensors());  // undefined on the other ranks
    }
    at::Tensor input = terms(5L * size_), output = zeros(5);
    keep(backend_._reduce_scatter_base(output, input), {output});
    std::vector<Tensors> parts(1);
    for (int peer = 0; peer < size_; ++peer) parts[0].push_back(terms(3 + 0L * peer));
    Tensors own = {zeros(3)};
    keep(backend_.reduce_scatter(own, parts), own);
  }

  void copies() {
    Tensors one = {terms(9)};
    c10d::BroadcastOptions from;
    from.rootRank = size_ - 1;
    keep(backend_.broadcast(one, from), one);
    at::Tensor input = terms(4), output = zeros(4L * size_);
    keep(backend_._allgather_base(output, input), {output});
    Tensors mine = {terms(6)};
    std::vector<Tensors> all = {zeros_for_all(6)};
    keep(backend_.allgather(all, mine), all[0]);
  }

  void exchanges() {
    std::vector<int64_t> even;
    at::Tensor input = terms(2L * size_), output = zeros(2L * size_);
    keep(backend_.alltoall_base(output, input, even, even), {output});
    std::vector<int64_t> rows;  // the same in both directions; some are empty
    int64_t total = 0;
    for (int peer = 0; peer < size_; ++peer) total += rows.emplace_back((rank_ + peer) % 3);
    at::Tensor table = terms(2 * total).view({total, 2}), got = zeros(2 * total).view({total, 2});
    std::vector<int64_t> same_rows = rows;  // Gloo moves from the vectors
    keep(backend_.alltoall_base(got, table, rows, same_rows), {got});
  }

  void to_and_from_a_root() {
    Tensors mine = {terms(4)};
    std::vector<Tensors> lists;
    c10d::GatherOptions to;
    if (rank_ == 0) lists = {zeros_for_all(4)};
    keep(backend_.gather(lists, mine, to), rank_ == 0 ? lists[0] : Tensors());
    Tensors output = {zeros(4)};
    std::vector<Tensors> inputs;
    c10d::ScatterOptions from;
    if (rank_ == 0) {
      inputs.emplace_back();
      for (int peer = 0; peer < size_; ++peer)
        inputs[0].push_back(put_(whole_numbers(peer + 20, 4).to(dtype_)));
    }
    keep(backend_.scatter(output, inputs, from), output);
  }

  /// Once around the ring: rank 0 sends first.
  void messages() {
    Tensors mine = {terms(8)}, got = {zeros(8)};
    const int next = (rank_ + 1) % size_, last = (rank_ + size_ - 1) % size_;
    if (rank_ == 0) backend_.send(mine, next, 5)->wait();
    keep(backend_.recv(got, last, 5), got);
    if (rank_ != 0) backend_.send(mine, next, 5)->wait();
  }

  const Tensors& results() const { return results_; }

 private:
  at::Tensor terms(int64_t numel) { return put_(whole_numbers(rank_, numel).to(dtype_)); }
  at::Tensor zeros(int64_t numel) { return put_(at::zeros({numel}, dtype_)); }
  Tensors zeros_for_all(int64_t numel) {
    Tensors result;
    for (int peer = 0; peer < size_; ++peer) result.push_back(zeros(numel));
    return result;
  }
  void keep(const WorkPtr& work, const Tensors& outputs) {
    work->wait();
    for (const at::Tensor& output : outputs) results_.push_back(output.cpu());
  }

  c10d::Backend& backend_;
  Put put_;
  at::ScalarType dtype_;
  int rank_, size_;
  Tensors results_;
};

Tensors results_of_all_calls(c10d::Backend& backend, const Put& put, at::ScalarType dtype) {
  Caller caller(backend, put, dtype);
  caller.reductions();
  caller.copies();
  caller.exchanges();
  caller.to_and_from_a_root();
  caller.messages();
  return caller.results();
}

TEST(NcclValues, EveryCallHasTheResultsOfGloo) {
  for (const int size : {2, 3, 5, 8}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    run_job(size, [&](NcclRank& self) {
      const auto oracle = gloo(store, self.rank, self.size);
      for (const auto dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kLong, at::kInt, at::kByte}) {
        const Tensors found = results_of_all_calls(
            *self.backend, [&](const at::Tensor& host) { return self.put(host); }, dtype);
        const Tensors expected = results_of_all_calls(
            *oracle, [](const at::Tensor& host) { return host; }, dtype);
        ASSERT_EQ(found.size(), expected.size());
        for (size_t i = 0; i < found.size(); ++i)
          EXPECT_TRUE(at::equal(found[i], expected[i]))
              << dtype << ", " << size << " ranks, result " << i << ": " << found[i]
              << ", expected " << expected[i];
      }
      self.meet();
      EXPECT_EQ(self.rules.counts(self.rank).calls.at("test").at("allreduce").calls, 18);
    });
  }
}

}  // namespace
}  // namespace lockstep::testing
