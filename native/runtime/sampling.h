// One token from one row of logits: a pure function of the logits, the parameters, the seed and the
// position.
#pragma once
#include <cstdint>
#include <vector>

#include "../kernels/api.h"

namespace octavo {

struct Adjustment {  // to the logit of one token
  int32_t token;
  float add;         // logit bias, presence and frequency penalties
  float repetition;  // divides positive logits and multiplies negative ones; 1: none
};

struct SamplingRow {
  float temperature, top_p, min_p, typical_p;
  int top_k;             // 0: all
  int logprobs;          // alternatives to report; -1: no log-probabilities at all
  int target;            // a token to report instead of drawing one; -1: draw
  bool legal;            // alternatives are taken from the tokens that mask and adjustments leave
  uint64_t seed, position;
  const Adjustment* adjustments;
  int adjustment_count;
  const uint32_t* mask;  // one bit a token, set for those that may be drawn; null: all
};

constexpr int32_t NO_TOKEN = -1;

struct Sample {
  int32_t token;                     // NO_TOKEN when mask and adjustments leave none
  // of the token under the unmodified distribution; 0 when not asked for
  float logprob;
  std::vector<int32_t> top_tokens;   // most likely first
  std::vector<float> top_logprobs;
};

// Whether nothing but the token of the largest logit is asked for.
bool wants_argmax(const SamplingRow& row);

// The inverse temperature of the sums that `row` asks of the head; 0: none.
float summed_inverse(const SamplingRow& row, int vocabulary);

// `logits` holds `vocabulary` values, with room for a multiple of 16, and `statistics`
// Logits::statistics_floats; both are modified. `measured`: every set has been measured with
// summed_inverse. Without log-probabilities, the logits of tokens outside the mask are never read.
Sample sample(const Kernels& k, float* logits, float* statistics, bool measured, int vocabulary,
    const SamplingRow& row);

// 53 random bits in [0, 1) of counter `position` under key `seed`: Philox-4x32-10 (Salmon et al.,
// 2011).
double uniform(uint64_t seed, uint64_t position);

}  // namespace octavo
