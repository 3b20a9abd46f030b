// A weight of int8 times up to 8 rows of x as integers, with AVX-512 VNNI: a lane for each of 16 outputs.
#pragma once

#include "linear/cpu/tiles.h"

#if MAMBA_ISA_LEVEL == 2

// What else is compiled for AVX-512 runs on CPUs without VNNI. cl takes any intrinsic anywhere.
#if defined(__GNUC__) || defined(__clang__)
#define MAMBA_VNNI __attribute__((target("avx512vnni"))) /* NOLINT(msvc): the branch for other compilers */
#else
#define MAMBA_VNNI
#endif

namespace mamba {
namespace MAMBA_ISA {

// sum plus the products of four elements of each output, as unsigned bytes, with four signed bytes of x, which are broadcast
// from memory. gcc would do that in an instruction of its own.
MAMBA_VNNI MAMBA_INLINE __m512i add_products(__m512i sum, __m512i weight, const int8_t* quad) {
#if defined(__GNUC__)
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" /* NOLINT(msvc): the branch for other compilers */
            : "+v"(sum)
            : "v"(weight), "m"(*reinterpret_cast<const int8_t(*)[4]>(quad)));
    return sum;
#else
    int32_t bits;
    memcpy(&bits, quad, sizeof(bits));
    return _mm512_dpbusd_epi32(sum, weight, _mm512_set1_epi32(bits));
#endif
}

// Of 16 rows of the weight the block at this offset: columns[i] has elements 4i to 4i + 3 of row `lane` in that lane, 128 added
// to each.
MAMBA_INLINE void transpose_blocks(const int8_t* const* rows, int64_t offset, __m512i* columns) {
    __m512i pairs[8], quads[8];
    for (int i = 0; i < 8; ++i) {
        const int row = i < 4 ? i : i + 4;
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row] + offset));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row + 4] + offset));
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        columns[i] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
    }
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(columns[i], columns[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(columns[i], columns[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        columns[i] = _mm512_shuffle_i32x4(quads[i], quads[i + 4], 0x88);
        columns[i + 4] = _mm512_shuffle_i32x4(quads[i], quads[i + 4], 0xdd);
    }
}

// The same of a block by its number. Of the last one, which may be short, copies with zeros.
inline void load_columns(const int8_t* const* rows, int64_t block, int64_t features, __m512i* columns) {
    const int64_t first = block * kFeatureBlock;
    if (features - first >= kFeatureBlock) {
        transpose_blocks(rows, first, columns);
        return;
    }
    int8_t copies[kLanes][kFeatureBlock];
    const int8_t* places[kLanes];
    for (int o = 0; o < kLanes; ++o) {
        places[o] = block_at(rows[o], first, features, copies[o]);
    }
    transpose_blocks(places, 0, columns);
}

// The weight's scales of blocks [begin, begin + count), count <= kScaleBlocks, as rows of floats with a lane for each output.
inline void transpose_scales(const TilePlace& at, const int64_t* outputs, int64_t begin, int count, float* scales) {
    const int64_t blocks = at.x->pitch / kFeatureBlock;
    for (int i = 0; i < count; i += kLanes) {
        const int lanes = block_lanes(count - i);
        Vec rows[kLanes];
        for (int o = 0; o < kLanes; ++o) {
            const Half* const from = static_cast<const Half*>(at.p->scales) + outputs[o] * blocks + begin + i;
            rows[o] = lanes == kLanes ? load(from) : load_partial(from, lanes);
        }
        transpose(rows);
        for (int block = 0; block < kLanes; ++block) {
            store(scales + (i + block) * kLanes, rows[block]);
        }
    }
}

// Half a block times kRows rows of x, their first bytes and their second ones.
template <int kRows>
MAMBA_VNNI MAMBA_INLINE void multiply_half(const __m512i* columns, const int8_t* x, int64_t pitch, __m512i* firsts,
                                           __m512i* seconds) {
    for (int quad = 0; quad < kFeatureBlock / 8; ++quad) {
        const __m512i weight = columns[quad];
        for (int r = 0; r < kRows; ++r) {
            firsts[r] = add_products(firsts[r], weight, x + r * pitch + 8 * quad);
            seconds[r] = add_products(seconds[r], weight, x + r * pitch + 8 * quad + 4);
        }
    }
}

// Outputs [first, first + count) of kRows rows, whose sums lie pitch_of_sums apart.
template <int kRows>
MAMBA_VNNI inline void project_vnni(const TilePlace& at, int64_t first, int count, float* sums, int64_t pitch_of_sums) {
    constexpr int kHalf = kLanes * kFeatureBlock / 2;  // bytes of the weight
    const int64_t features = at.p->features, pitch = at.x->pitch, blocks = pitch / kFeatureBlock;
    const int8_t* const weight = static_cast<const int8_t*>(at.p->weight);
    const int8_t* const x = at.x->bytes + 2 * at.row * pitch;
    const int32_t* const starts = at.x->starts + at.row * blocks;
    const float* const x_scales = at.x->scales + at.row * blocks;
    int64_t outputs[kLanes];
    const int8_t* rows[kLanes];
    for (int o = 0; o < kLanes; ++o) {
        outputs[o] = first + (o < count ? o : count - 1);
        rows[o] = weight + outputs[o] * features;
    }
    const int8_t* const next = weight + (first + kLanes) * features;
    Vec totals[kRows];
    for (int r = 0; r < kRows; ++r) {
        totals[r] = zero();
    }
    alignas(64) float scales[kScaleBlocks * kLanes];
    // A block is transposed while the one before it is multiplied: the processor looks ahead about as far.
    __m512i both[2][kFeatureBlock / 4];
    if (blocks > 0) {
        load_columns(rows, 0, features, both[0]);
    }
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t scale_block = block % kScaleBlocks;
        if (scale_block == 0) {
            const int64_t left = blocks - block;
            transpose_scales(at, outputs, block, left < kScaleBlocks ? static_cast<int>(left) : kScaleBlocks, scales);
        }
        if (block + 1 < blocks) {
            load_columns(rows, block + 1, features, both[(block + 1) % 2]);
        }
        const __m512i* const columns = both[block % 2];
        // Of x's first bytes and of its second ones. What 128 more in the weight's bytes add is left out by the starts.
        __m512i firsts[kRows], seconds[kRows];
        for (int r = 0; r < kRows; ++r) {
            firsts[r] = _mm512_setzero_si512();
            seconds[r] = _mm512_set1_epi32(starts[r * blocks + block]);
        }
        const int8_t* const x_block = x + 2 * block * kFeatureBlock;
        for (int half = 0; half < 2; ++half) {  // in a loop of all 8, gcc would copy each sum
            multiply_half<kRows>(columns + 4 * half, x_block + 32 * half, 2 * pitch, firsts, seconds);
            for (int line = 0; line < kHalf; line += kCacheLine) {  // few at a time, or what is loaded would wait for them
                prefetch(next + (2 * block + half) * kHalf + line);
            }
        }
        const Vec scale = load(scales + scale_block * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vec product = {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(firsts[r], 8), seconds[r]))};
            totals[r] = fma(product, scale * set1(x_scales[r * blocks + block]), totals[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        store(sums + r * pitch_of_sums, totals[r]);
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba

#endif
