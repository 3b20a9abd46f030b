// How the convolution's backward is cut up on CUDA (causal_conv1d/plan.h), which needs no GPU: the plan looks at few counts of
// slots and segments, and must find what looking at all of them finds.
#include "causal_conv1d/plan.h"

#include "tests/testing.h"

using mamba::ceil_div;
using mamba::ConvBackwardPlan;
using mamba::kConvMaxSlots;
using mamba::kTimeSegment;
using testing::begin_case;
using testing::expect;

// Lanes along time: the fewest slots of those that take least, each of whole rows or of equal parts of one.
static ConvBackwardPlan time_of_all(int64_t batch, int64_t dim, int64_t length) {
    const int64_t wave = 4096;
    const int64_t warps = length >= 256 ? dim : ceil_div(dim * length, 256);
    ConvBackwardPlan plan = {};
    int64_t least = INT64_MAX;
    for (int64_t slots = 1;
         slots <= kConvMaxSlots && slots <= batch * ceil_div(length, kTimeSegment) && slots <= ceil_div(4 * wave, warps);
         ++slots) {
        if (slots > batch && slots % batch != 0) {
            continue;
        }
        const int64_t parts = slots <= batch ? 1 : slots / batch;
        const int64_t segment = mamba::round_up(ceil_div(length, parts), kTimeSegment);
        const int64_t steps = slots <= batch ? ceil_div(batch, slots) * length : segment;
        const int64_t time = ceil_div(slots * warps, wave) * steps + (slots > 1 ? 1024 : 0);
        if (time < least) {
            least = time;
            plan.segment = segment < 32 * kTimeSegment ? segment : 32 * kTimeSegment;
            plan.segments = ceil_div(length, plan.segment);
            plan.slots = slots;
        }
    }
    return plan;
}

// Lanes along channels: the fewest segments of those that take least.
static ConvBackwardPlan channel_of_all(int64_t batch, int64_t dim, int64_t length, int64_t channels) {
    const int64_t blocks = ceil_div(dim, channels), at_once = blocks < 264 ? 264 / blocks : 1;
    const int64_t slots = at_once < kConvMaxSlots ? at_once : kConvMaxSlots;
    ConvBackwardPlan plan = {};
    int64_t least = INT64_MAX;
    for (int64_t segments = 1; segments <= 16 || segments <= ceil_div(slots, batch); ++segments) {
        const int64_t segment = ceil_div(length, segments), items = ceil_div(batch * segments, slots);
        if (segments > 1 && segment < 64) {
            break;
        }
        if (items * (segment + 48) < least) {
            least = items * (segment + 48);
            plan.segment = segment;
            plan.segments = ceil_div(length, segment);
            plan.slots = ceil_div(batch * plan.segments, items);
        }
    }
    return plan;
}

static void expect_same(const char* lanes, int64_t batch, int64_t dim, int64_t length, const ConvBackwardPlan& found,
                        const ConvBackwardPlan& best) {
    begin_case("lanes along %s, batch %lld, dim %lld, length %lld", lanes, static_cast<long long>(batch),
               static_cast<long long>(dim), static_cast<long long>(length));
    expect(found.slots == best.slots, "slots");
    expect(found.segment == best.segment && found.segments == best.segments, "segments");
}

static void test_plans() {
    const int64_t batches[] = {1, 2, 3, 5, 8, 13, 16, 64, 97, 255, 256, 257, 1000};
    const int64_t dims[] = {1, 16, 17, 63, 128, 130, 768, 1536, 1792, 2304, 4096, 4352, 8192, 16384, 16385, 40000};
    const int64_t lengths[] = {1,   2,   63,   64,   65,   127,  128,   255,    256,    511,
                               512, 513, 1000, 2048, 2049, 8191, 16384, 100000, 1 << 20};
    for (int64_t batch : batches) {
        for (int64_t dim : dims) {
            for (int64_t length : lengths) {
                expect_same("time", batch, dim, length, mamba::conv_backward_plan_time(batch, dim, length),
                            time_of_all(batch, dim, length));
                for (int64_t channels = 64; channels <= 128; channels *= 2) {
                    expect_same("channels", batch, dim, length, mamba::conv_backward_plan_channel(batch, dim, length, channels),
                                channel_of_all(batch, dim, length, channels));
                }
            }
        }
    }
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, test_plans);
}
