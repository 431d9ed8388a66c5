// How many members of a pool work, where the host may have less for them than it seems.
#pragma once
#include <algorithm>

namespace octavo {

// Where others want the same cores, members spend their time waiting for the one that is off its
// core, and fewer get more done. What is got done is measured: seconds of work, without those of
// waiting, by the second. When that is well below the members' number, one less is tried, and stays
// away if no less is done without it. From time to time it is tried again, more and more rarely
// while that is in vain, and the more rarely the longer it took.
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
  static constexpr double ALIKE = 0.97;   // the share of a rate that counts as no less than it
  static constexpr double GAIN = 0.3;     // that another member must bring, of a core
  static constexpr int WINDOWS = 3;       // in which it must, one after the other
  static constexpr double LATEST = 0.25;  // the last window's share in the rate that is known
  // Seconds between trials; where a trial took long, COST times as long as that.
  static constexpr double SHORTEST = 0.12, LONGEST = 2, RAREST = 30, COST = 20;

  void rest(double rate) {
    rate_ = rate_ < 0 ? rate : rate_ + LATEST * (rate - rate_);
    wait_ -= seconds_;
    if (wait_ > 0) return;
    fewer_ = rate_ < BUSY * size_ && size_ > 1 && (size_ == most_ || fewer_);
    if (!fewer_ && size_ == most_) return;
    size_ += fewer_ ? -1 : 1;
    left_ = fewer_ ? 1 : WINDOWS, took_ = 0;
  }

  void judge(double rate) {
    took_ += seconds_;
    const bool better = rate >= (fewer_ ? ALIKE * rate_ : rate_ + GAIN);
    if (better && --left_ > 0) return;
    if (better) {
      settled_ = size_, rate_ = rate, wait_ = 0, pause_ = SHORTEST;
      return;
    }
    wait_ = std::max(pause_, std::min(COST * (took_ - WINDOW), RAREST));
    pause_ = std::min(2 * pause_, LONGEST);
    size_ = settled_, fewer_ = !fewer_;
  }

  const int most_;
  int size_, settled_;  // they differ while another number is tried
  double seconds_ = 0, worked_ = 0;        // of this window
  double rate_ = -1;                       // of the settled number: its last windows'
  double wait_ = 0, pause_ = SHORTEST;     // until the next trial, and after one in vain
  bool fewer_ = true;                      // what a trial is of, or the next one may be
  int left_ = 0;                           // windows until a trial is won
  double took_ = 0;                        // seconds of a trial
};

}  // namespace octavo
