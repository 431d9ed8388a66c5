// Pictures in other sizes, with Pillow's arithmetic: 8 bits between the passes, fractions of 22.
#pragma once
#include <stdint.h>

#include <vector>

#include "kernels/api.h"

namespace octavo {

// What each line of the result is made of, along one side: lines from 2 * first[i] on, in pairs,
// and of each its share in units of 2^-22, `width` a line of the result.
struct Taps {
  const int32_t *first, *pairs, *shares;
  int count, width;
};

// rgb: [height][width][3]; out: [y.count][x.count][3].
void resample(const Kernels& k, const uint8_t* rgb, int height, int width, const Taps& x,
    const Taps& y, uint8_t* out);

}  // namespace octavo
