// How many members of a pool work, where the host may have less for them than it seems.
#pragma once
#include <algorithm>

namespace octavo {

// Where others want the same cores, members spend their time waiting for the one that is off its
// core, and fewer get more done. What is got done is measured: seconds of work, without those of
// waiting, by the second. When that is well below the members' number, one less is tried, and stays
// away if no less is done without it. From time to time it is tried again, ever more rarely in
// vain, and not while the only one that works is off its core itself.
class Crew {
 public:
  explicit Crew(int most) : most_(most), size_(most), settled_(most) {}

  int size() const { return size_; }

  // What the members did together in a call, in seconds of their own work.
  void note(double seconds, double worked) {
    if (most_ == 1) return;
    seconds_ += seconds, worked_ += worked;
    if (seconds_ < WINDOW) return;
    const double rate = worked_ / seconds_;
    if (size_ == settled_) rest(rate);
    else judge(rate);
    seconds_ = worked_ = 0;
  }

 private:
  static constexpr double WINDOW = 0.03;  // seconds: some slices of a scheduler's
  static constexpr double BUSY = 0.65;    // of the members' time: above, nothing is wrong
  static constexpr double ALONE = 0.85;   // of the only member's: below, others want its core
  static constexpr double GAIN = 0.3;     // that another member must bring, of a core
  static constexpr double ROUGH = 0.8;    // of a rate below one core's, which is as good as it
  static constexpr double LATEST = 0.25;  // of a rate: the last window's share
  // Seconds between trials; where a trial itself took long, many times as long.
  static constexpr double SHORTEST = 0.12, LONGEST = 2, COST = 20;

  void rest(double rate) {
    rate_ = rate_ < 0 ? rate : rate_ + LATEST * (rate - rate_);
    wait_ -= seconds_;
    if (wait_ > 0) return;
    const bool idle = rate_ < BUSY * size_ && size_ > 1;
    fewer_ = idle && (size_ == most_ || fewer_);
    if (!fewer_ && (size_ == most_ || (size_ == 1 && rate_ < ALONE))) return;
    size_ += fewer_ ? -1 : 1;
  }

  // Work that makes members wait keeps one of them busy: who together do less than one core's are
  // kept from it by others, and what they get done then differs much from window to window.
  double least() const { return !fewer_ ? rate_ + GAIN : rate_ < 1 ? ROUGH * rate_ : rate_; }

  void judge(double rate) {
    const bool better = rate >= least();
    wait_ = better ? 0 : std::max(pause_, COST * (seconds_ - WINDOW));
    pause_ = better ? double(SHORTEST) : std::min(2 * pause_, double(LONGEST));
    if (better) settled_ = size_, rate_ = rate;
    else size_ = settled_, fewer_ = !fewer_;
  }

  const int most_;
  int size_, settled_;  // they differ while another number is tried
  double seconds_ = 0, worked_ = 0;        // of this window
  double rate_ = -1;                       // of the settled number: its last windows'
  double wait_ = 0, pause_ = SHORTEST;     // until the next trial, and after one in vain
  bool fewer_ = true;                      // what a trial is of, or the next one may be
};

}  // namespace octavo
