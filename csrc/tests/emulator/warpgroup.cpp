// Products of a warpgroup. A warp's rows of one need its own registers and shared memory alone, so that warps compute theirs by
// themselves.
#include "machine.h"

namespace emulator {

namespace {

uint16_t half_of(uint32_t pair, int i) {
    return static_cast<uint16_t>(pair >> 16 * i);
}

// Element k of row `row` of a tile whose rows of 128 bytes have their eight pieces swapped by the address ("128-byte swizzle").
// rows_of_k: its rows are those of k.
uint16_t element_of_tile(uint64_t tile, bool rows_of_k, int row, int k) {
    const auto field = [&](int bit) { return static_cast<uint32_t>(tile >> bit & 0x3fff) << 4; };
    const uint32_t first = field(0), leading = field(16), stride = field(32);
    uint32_t address = first;
    if (rows_of_k) {
        address += row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2;
    } else {
        address += row / 8 * stride + row % 8 * 128 + k * 2;
    }
    address ^= (address >> 7 & 7) << 4;
    return *static_cast<const uint16_t*>(at_shared_address(address));
}

// Adds the thread's part of product `index` of its group `group`, the oldest being 0.
void add(const Product& product, size_t group, size_t index, std::vector<float>& sums) {
    const unsigned first = this_thread().number / 32 * 32;
    const int row = lane() / 4, pair = lane() % 4;
    float a[2][16];
    for (int k = 0; k < 16; ++k) {
        if (product.a == nullptr) {
            const int tile_row = static_cast<int>(first / 32 % 4 * 16) + row;
            for (int i = 0; i < 2; ++i) {
                a[i][k] = product.element(element_of_tile(product.a_tile, product.a_rows_of_k, tile_row + 8 * i, k));
            }
            continue;
        }
        const Thread& holder = this_block().threads[first + row * 4 + k % 8 / 2];
        const uint32_t* const registers = holder.product_groups[group][index].a;
        for (int i = 0; i < 2; ++i) {
            a[i][k] = product.element(half_of(registers[i + k / 8 * 2], k % 2));
        }
    }
    for (int column = 0; column < product.columns; ++column) {
        if (column % 8 / 2 != pair) {
            continue;
        }
        for (int k = 0; k < 16; ++k) {
            const float b = product.element(element_of_tile(product.b, product.rows_of_k, column, k));
            for (int i = 0; i < 2; ++i) {
                sums[column / 8 * 4 + 2 * i + column % 2] += a[i][k] * b;
            }
        }
    }
}

}  // namespace

void wgmma(const Product& product) {
    if (product.b >> 62 != 1 || (product.a == nullptr && product.a_tile >> 62 != 1)) {
        fail("a tile with another swizzle than that of 128 bytes, which the emulator does not know");
    }
    Thread& thread = this_thread();
    Accumulators& accumulators = thread.accumulators[product.c];
    if (accumulators.products++ == 0) {
        accumulators.sums.assign(product.c, product.c + product.columns / 2);
        memset(product.c, 0xff, sizeof(float) * product.columns / 2);
    }
    thread.products.push_back(product);
}

void wgmma_commit_group() {
    Thread& thread = this_thread();
    thread.product_groups.push_back(thread.products);
    thread.products.clear();
}

void wgmma_wait_group(int pending) {
    Thread& thread = this_thread();
    meet_warp("wgmma_wait_group");
    const size_t groups = thread.product_groups.size();
    const size_t done = groups > static_cast<size_t>(pending) ? groups - pending : 0;
    for (size_t group = 0; group < done; ++group) {
        for (size_t i = 0; i < thread.product_groups[group].size(); ++i) {
            const Product& product = thread.product_groups[group][i];
            Accumulators& accumulators = thread.accumulators[product.c];
            add(product, group, i, accumulators.sums);
            if (--accumulators.products == 0) {
                memcpy(product.c, accumulators.sums.data(), sizeof(float) * product.columns / 2);
                thread.accumulators.erase(product.c);
            }
        }
    }
    meet_warp("the end of wgmma_wait_group");  // the other lanes have read this one's registers
    thread.product_groups.erase(thread.product_groups.begin(), thread.product_groups.begin() + done);
}

}  // namespace emulator
