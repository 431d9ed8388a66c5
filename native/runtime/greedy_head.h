// The token of the largest logit, for rows of which nothing else is wanted. High digits of the
// inputs, at half the products, leave few tokens that can have it; of those both digits are
// multiplied, as they are where all logits are wanted. So it is the same token.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "logits.h"
#include "ops.h"
#include "sampling.h"

namespace octavo {

class GreedyHead {
 public:
  // Of a layer for at most so many rows; null where high digits alone are no part of its arithmetic
  // or no quicker, or its weights have minima.
  static std::unique_ptr<GreedyHead> of(const Kernels& kernels, const LinearPart& head,
      const Act& in, int rows, int threads, Arena& arena);

  // Floats that `run` needs of each thread.
  static size_t scratch_floats(int rows) { return size_t(std::min(rows, SCREENED)) * SET_TOKENS; }

  // Reads about a quarter of so many more bytes of packed weights, which takes as long as to pack
  // all of them. It needs their norms before it can run; whether any are left.
  bool measure(size_t bytes, Team& team);
  bool ready() const { return measured_ == weight_.panel_count(); }

  void begin(int rows);  // before the threads of a step
  void run(Context& c, int rows, const Act& act, int thread, Work& work);
  // What they have found; NO_TOKEN of a row whose sums may overflow: it has all its logits.
  int32_t token(int row) const;

 private:
  struct Found {
    float logit;
    int32_t token;
    bool before(const Found& o) const {
      return logit > o.logit || (logit == o.logit && token < o.token);
    }
  };
  struct Row;
  // Rows of a step that are screened together: what is found of a set stays in the second cache.
  static constexpr int SCREENED = 64;

  GreedyHead(const LinearPart& head, int rows, int threads);
  Act high_digits(const Act& act) const;
  void settle(const Context& c, int from, int to, const float* screened, Row& row) const;
  void multiply(const Context& c, int panel, Row& row) const;

  const Matrix& weight_;
  const Buffer out_;
  std::vector<std::atomic<float>> best_;  // by row: the largest logit that any thread has seen
  std::vector<std::vector<Found>> found_; // by thread and row
  float* norms_ = nullptr;                // of each token's weights; not 0
  float largest_norm_ = 0;
  int measured_ = 0;                      // panels
};

}  // namespace octavo
