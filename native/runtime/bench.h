// Timing of single kernels and of what the host can do at most.
#pragma once
#include <optional>
#include <string>

namespace octavo {

struct HostLimits {
  double read_gbs;            // memory, all threads, from a buffer of `bytes`
  double registers_gops;      // int8 operations (two a product) in vector registers, all threads
  double widest_gops;         // the same by the widest means of the instruction set (tiles)
};

HostLimits measure_limits(const std::string& isa, int threads, size_t bytes, double seconds);

// Seconds that y[tokens][rows] = x[tokens][cols] W^T takes, least of all repetitions within
// `seconds`. `copies` matrices are used in turn: enough of them and each comes from memory.
// second_lines: of inputs whose groups have scales of their own (Act::second_lines).
double time_linear(const std::string& isa, int type, int group, size_t rows, size_t cols,
    std::optional<int> second_lines, int tokens, int threads, int copies, double seconds);

// Seconds of one attention of a KV head over `keys` keys, for `queries` rows.
double time_attention(
    const std::string& isa, int kv_type, int head_dim, int queries, int keys, double seconds);

}  // namespace octavo
