#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/datasets/sample_source.h"

namespace lockstep {

/// The token ids of one micro-batch of one rank.
struct Microbatch {
  int64_t consumed_samples = 0;  ///< consumed when its iteration begins
  int64_t number = 0;            ///< in the iteration
  SampleRange samples;
  std::vector<int64_t> ids;        ///< [samples, seq_length + 1]
  std::vector<SampleMarks> marks;  ///< of each sample
};

/// Reads the micro-batches of one data-parallel rank, iteration after iteration; a thread can read
/// some of them ahead. Which ones they are depends only on the number of consumed samples. Needs no
/// libtorch. Only one thread may call it.
class MicrobatchLoader {
 public:
  struct Options {
    int64_t seq_length = 0;
    int64_t rank = 0;  ///< data-parallel
    int64_t ranks = 1;
    int64_t prefetch = 0;  ///< micro-batches to read ahead; 0: none, and no thread
  };

  MicrobatchLoader(std::unique_ptr<SampleSource> source, BatchSchedule schedule, Options options);
  /// Ends the thread, which first finishes the micro-batch that it is reading.
  ~MicrobatchLoader();
  MicrobatchLoader(const MicrobatchLoader&) = delete;
  MicrobatchLoader& operator=(const MicrobatchLoader&) = delete;

  /// next() continues with the iteration that begins when `consumed_samples` have been consumed.
  /// Initially that is 0. Costs nothing if next() is already there.
  void seek(int64_t consumed_samples);

  /// The next micro-batch. If reading one throws (SampleSource::read()), every call until the next
  /// seek() throws that, after the micro-batches before it have been returned.
  Microbatch next();

  /// How long next() has waited for data in total.
  double seconds_waited() const { return seconds_waited_; }

 private:
  Microbatch read();
  Microbatch take();
  void read_ahead();
  /// Advances by one micro-batch.
  void advance(int64_t& consumed_samples, int64_t& number) const;
  void stop();

  std::unique_ptr<SampleSource> source_;
  BatchSchedule schedule_;
  Options options_;
  double seconds_waited_ = 0;
  int64_t next_consumed_ = 0;  ///< of what next() returns next
  int64_t next_number_ = 0;

  // The position of read(). Used only by the thread, while there is one.
  int64_t consumed_samples_ = 0;
  int64_t number_ = 0;

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Microbatch> ready_;
  std::exception_ptr error_;  ///< from the micro-batch after those that are ready
  bool stopping_ = false;
};

}  // namespace lockstep
