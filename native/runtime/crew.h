// How many members of a pool work, where the host may have less for them than it seems.
#pragma once
#include <algorithm>

namespace octavo {

// Where others want the same cores, members spend their time waiting for the one that is off its
// core, and fewer get more done. What is got done is measured: seconds of work, without those of
// waiting, by the second. When that is well below the members' number, one less is tried, and stays
// away if no less is done without it. From time to time it is tried again, ever more rarely in
// vain.
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
    seconds_ = worked_ = 0;
    if (size_ == settled_) rest(rate);
    else judge(rate);
  }

 private:
  static constexpr double WINDOW = 0.03;  // seconds: some slices of a scheduler's
  static constexpr double BUSY = 0.65;    // of the members' time: above, nothing is wrong
  static constexpr double GAIN = 0.3;     // that another member must bring, of a core
  static constexpr int SHORTEST = 4, LONGEST = 64;  // windows between trials

  void rest(double rate) {
    rate_ = rate;
    if (wait_-- > 0) return;
    wait_ = 0;
    const bool idle = rate < BUSY * size_ && size_ > 1;
    const bool fewer = idle && (size_ == most_ || !fewer_);
    if (!fewer && size_ == most_) return;
    fewer_ = fewer;
    size_ += fewer ? -1 : 1;
  }

  void judge(double rate) {
    const bool better = rate >= rate_ + (fewer_ ? 0 : GAIN);
    wait_ = better ? 0 : pause_;
    pause_ = better ? int(SHORTEST) : std::min(2 * pause_, int(LONGEST));
    if (better) settled_ = size_, rate_ = rate;
    else size_ = settled_;
  }

  const int most_;
  int size_, settled_;  // they differ while another number is tried
  double seconds_ = 0, worked_ = 0, rate_ = 0;
  int wait_ = 0, pause_ = SHORTEST;  // windows until the next trial, and after one in vain
  bool fewer_ = false;               // whether the last trial was one of fewer
};

}  // namespace octavo
