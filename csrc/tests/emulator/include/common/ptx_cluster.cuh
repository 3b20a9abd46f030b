// The functions of csrc/common/ptx_cluster.cuh: the emulated GPU has no clusters, and no kernel may come here.
#pragma once

#include "common/ptx.cuh"

namespace mamba {

inline void cluster_arrive_relaxed() {
    emulator::fail("a cluster, which the emulator does not know");
}
inline void cluster_wait() {
    cluster_arrive_relaxed();
}
inline void mbarrier_init_cluster(uint64_t*) {
    cluster_arrive_relaxed();
}
inline void mbarrier_arrive_expect_tx_cluster(uint64_t*, uint32_t) {
    cluster_arrive_relaxed();
}
inline void st_async_cluster(float*, uint64_t*, uint32_t, float) {
    cluster_arrive_relaxed();
}
inline void mbarrier_wait_cluster(uint64_t*) {
    cluster_arrive_relaxed();
}

}  // namespace mamba
