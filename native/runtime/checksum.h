// A sum of bytes that changes whenever any one 64-bit word does, at the speed of memory: eight
// lanes that multiply for themselves, each step of which is a bijection of the lane.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace octavo {

constexpr size_t CHECKSUM_LINE = 64;

// Of `bytes` bytes, whole lines.
inline uint64_t checksum(const uint8_t* data, size_t bytes, uint64_t seed) {
  constexpr uint64_t ODD = 0x9E3779B97F4A7C15;
  constexpr size_t LANES = CHECKSUM_LINE / sizeof(uint64_t);
  uint64_t lane[LANES];
  for (size_t i = 0; i < LANES; i++) lane[i] = seed + i;
  for (size_t at = 0; at < bytes; at += CHECKSUM_LINE) {
    uint64_t word[LANES];
    memcpy(word, data + at, sizeof word);
    for (size_t i = 0; i < LANES; i++) {
      lane[i] = (lane[i] ^ word[i]) * ODD;
      lane[i] ^= lane[i] >> 32;
    }
  }
  uint64_t sum = bytes;
  for (const uint64_t x : lane) {
    sum = (sum ^ x) * ODD;
    sum ^= sum >> 32;
  }
  return sum;
}

}  // namespace octavo
