// The tables of kernels of a library: their list, counts of launches, and the C ABI. In mamba_cpu the list is empty.
#include "common/kernel_table.h"

#include <stdlib.h>

#include <atomic>

#include "common/check.h"
#include "mamba_kernels.h"

namespace mamba {
namespace {

constexpr int kMostTables = 32;

struct State {
    KernelTable* table;
    std::atomic<int64_t> launches[KernelTable::kMostRows][kDtypes];
    std::atomic<bool> off[KernelTable::kMostRows];
};

// Zero before any constructor runs.
State states[kMostTables];
int tables;

// One row of a table; table nullptr: there is none.
struct Place {
    KernelTable* table;
    int kernel;
};

Place place_of(int32_t index) {
    int left = index;
    for (int i = 0; i < tables && index >= 0; ++i) {
        if (left < states[i].table->count) {
            return {states[i].table, left};
        }
        left -= states[i].table->count;
    }
    return {nullptr, 0};
}

// Refuses an index without a row.
Place checked_place(Check& check, int32_t index) {
    const Place place = place_of(index);
    check.that(place.table != nullptr, MAMBA_ERROR_INVALID, "index must be in [0, %d), got %d",
               static_cast<int>(mamba_kernel_count()), static_cast<int>(index));
    return place;
}

}  // namespace

int KernelTable::add_to_list(KernelTable* table) {
    if (tables == kMostTables) {
        abort();  // at the load of a library that nobody can have used: raise kMostTables
    }
    states[tables].table = table;
    return tables++;
}

int64_t KernelTable::launches(int kernel, int32_t dtype) const {
    return states[number_].launches[kernel][dtype].load(std::memory_order_relaxed);
}

void KernelTable::count_launch(int kernel, int32_t dtype) {
    states[number_].launches[kernel][dtype].fetch_add(1, std::memory_order_relaxed);
}

bool KernelTable::is_on(int kernel) const {
    return !states[number_].off[kernel].load(std::memory_order_relaxed);
}

void KernelTable::turn(int kernel, bool on) {
    states[number_].off[kernel].store(!on, std::memory_order_relaxed);
}

}  // namespace mamba

using namespace mamba;

int32_t mamba_kernel_count(void) {
    int32_t count = 0;
    for (int i = 0; i < tables; ++i) {
        count += states[i].table->count;
    }
    return count;
}

int32_t mamba_kernel(int32_t index, MambaKernel* kernel) {
    Check check("kernel");
    check.pointer("kernel", kernel);
    const Place place = checked_place(check, index);
    if (check.ok()) {
        const KernelRow& row = place.table->row(place.kernel);
        *kernel = MambaKernel{};
        kernel->op = place.table->op;
        kernel->name = row.name;
        kernel->needs = row.needs;
        kernel->shape = row.shape;
        kernel->dtypes = static_cast<int32_t>(row.dtypes);
        kernel->threads = row.threads;
        kernel->shared_bytes = row.shared_bytes;
        kernel->architecture = row.architecture;
        kernel->enabled = place.table->is_on(place.kernel);
    }
    return check.status();
}

int64_t mamba_kernel_launches(int32_t index, int32_t dtype) {
    const Place place = place_of(index);
    return place.table == nullptr || dtype < 0 || dtype >= kDtypes ? -1 : place.table->launches(place.kernel, dtype);
}

int32_t mamba_kernel_enable(int32_t index, int32_t enabled) {
    Check check("kernel_enable");
    const Place place = checked_place(check, index);
    if (check.ok()) {
        const KernelRow& row = place.table->row(place.kernel);
        check.that(enabled != 0 || row.needs[0] != '\0', MAMBA_ERROR_INVALID,
                   "%s of %s takes any call: without it some would have no kernel", row.name, place.table->op);
    }
    if (check.ok()) {
        place.table->turn(place.kernel, enabled != 0);
    }
    return check.status();
}
