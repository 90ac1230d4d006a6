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
  int64_t consumed_samples = 0;  ///< when its iteration begins
  int64_t number = 0;            ///< in the iteration
  SampleRange samples;
  std::vector<int64_t> ids;        ///< [samples, seq_length + 1]
  std::vector<SampleMarks> marks;  ///< of each sample
};

/// Reads the micro-batches of one data-parallel rank, those of iteration after iteration, and by a
/// thread some of them ahead. Which they are depends on the number of consumed samples alone. Needs
/// no libtorch. One thread calls it.
class MicrobatchLoader {
 public:
  struct Options {
    int64_t seq_length = 0;
    int64_t rank = 0;  ///< data-parallel
    int64_t ranks = 1;
    int64_t prefetch = 0;  ///< micro-batches that are read ahead; 0: none, and no thread
  };

  MicrobatchLoader(std::unique_ptr<SampleSource> source, BatchSchedule schedule, Options options);
  /// Ends the thread, which finishes the micro-batch that it reads.
  ~MicrobatchLoader();
  MicrobatchLoader(const MicrobatchLoader&) = delete;
  MicrobatchLoader& operator=(const MicrobatchLoader&) = delete;

  /// next() goes on with the iteration that begins when `consumed_samples` are consumed. At first
  /// that is 0. Costs nothing where next() is there already.
  void seek(int64_t consumed_samples);

  /// The next micro-batch. What reading one throws (SampleSource::read()) is thrown here, by every
  /// call until the next seek(), after the micro-batches before it were given.
  Microbatch next();

  /// How long next() has waited for data in all.
  double seconds_waited() const { return seconds_waited_; }

 private:
  Microbatch read();
  Microbatch take();
  void read_ahead();
  /// Goes on by a micro-batch.
  void advance(int64_t& consumed_samples, int64_t& number) const;
  void stop();

  std::unique_ptr<SampleSource> source_;
  BatchSchedule schedule_;
  Options options_;
  double seconds_waited_ = 0;
  int64_t next_consumed_ = 0;  ///< of what next() returns next
  int64_t next_number_ = 0;

  // Where read() is. The thread's, while there is one.
  int64_t consumed_samples_ = 0;
  int64_t number_ = 0;

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Microbatch> ready_;
  std::exception_ptr error_;  ///< of the micro-batch after those that are ready
  bool stopping_ = false;
};

}  // namespace lockstep
