#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"
#include "ballast/device/streams.h"

#include "src/comm/sum.h"

namespace ballast::test {

/// The channels of all ranks of a run whose ranks are threads. Each channel has all ranks in order.
/// The n-th channel that a rank makes is connected to the n-th channel of each other rank. A rank
/// that waits in a collective of a channel which another rank has left gets Error(comm) at once,
/// where over MPI it would wait for a timeout.
class ThreadChannels {
 public:
  /// Called on a rank's stream before it takes part in collective number `call` (from 0) of its
  /// channel number `channel`.
  using Hook = std::function<void(std::uint32_t rank, std::size_t channel, std::size_t call)>;

  explicit ThreadChannels(std::uint32_t world, Hook before = {})
      : world_(world), before_(std::move(before)), made_(world) {}

  /// For ThreadRanks::MakeChannel.
  std::unique_ptr<comm::Communicator> make(std::uint32_t rank) {
    const std::scoped_lock lock(mutex_);
    const std::size_t number = made_[rank]++;
    while (channels_.size() <= number) channels_.push_back(std::make_shared<Channel>(world_));
    return std::make_unique<Member>(*this, channels_[number], rank, number);
  }
  /// Number of collectives that one rank left while another waited in them.
  [[nodiscard]] std::size_t broken() const {
    const std::scoped_lock lock(mutex_);
    return broken_;
  }

 private:
  struct Channel {
    explicit Channel(std::uint32_t world) : parts(world) {}
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<ConstDeviceBytes> parts;
    std::uint32_t arrived = 0;
    std::uint64_t round = 0;
    bool left = false;
  };

  class Member final : public comm::Communicator {
   public:
    Member(ThreadChannels& all, std::shared_ptr<Channel> channel, std::uint32_t rank,
           std::size_t number)
        : all_(all), channel_(std::move(channel)), rank_(rank), number_(number) {}
    ~Member() override {
      const std::scoped_lock lock(channel_->mutex);
      channel_->left = true;
      channel_->changed.notify_all();
    }

    void all_gather(device::Stream& stream, ConstDeviceBytes shard, DeviceBytes whole) override {
      exchange(stream, shard, [=, this] {
        for (std::size_t r = 0; r < channel_->parts.size(); ++r) {
          const ConstDeviceBytes part = channel_->parts[r];
          std::byte* const to = whole.raw() + r * part.size();
          if (to != part.raw()) std::copy_n(part.raw(), part.size(), to);
        }
      });
    }
    void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes shard, DType type,
                        DeviceBytes) override {
      sum(stream, whole, rank_ * shard.size(), shard, type);
    }
    void all_reduce(device::Stream& stream, DeviceBytes whole, DType type, DeviceBytes) override {
      sum(stream, whole, 0, whole, type);
    }
    void all_to_all(device::Stream&, ConstDeviceBytes, std::span<const Bytes>, DeviceBytes,
                    std::span<const Bytes>) override {
      throw Error(ErrorCategory::comm, "these channels have no all_to_all");
    }
    void sum_terms(device::Stream&, const comm::OrderedSum&, ConstDeviceBytes, ConstDeviceBytes,
                   DeviceBytes, DeviceBytes) override {
      throw Error(ErrorCategory::comm, "these channels have no sum_terms");
    }
    void broadcast(device::Stream&, DeviceBytes, std::uint32_t) override {
      throw Error(ErrorCategory::comm, "these channels have no broadcast");
    }

   private:
    /// Calls `work` when all members have passed their `part`. Returns when all calls are done.
    void exchange(device::Stream& stream, ConstDeviceBytes part, std::function<void()> work) {
      device::as_host(stream).enqueue([this, part, work = std::move(work)] {
        if (all_.before_) all_.before_(rank_, number_, calls_);
        ++calls_;
        channel_->parts[rank_] = part;
        meet();
        work();
        meet();
      });
    }

    void sum(device::Stream& stream, ConstDeviceBytes whole, std::size_t first, DeviceBytes to,
             DType type) {
      auto result = std::make_shared<std::vector<std::byte>>(to.size());
      exchange(stream, whole, [=, this] {
        std::vector<const std::byte*> terms;
        for (const ConstDeviceBytes part : channel_->parts) terms.push_back(part.raw() + first);
        comm::sum_in_order(terms, result->data(), result->size(), type);
      });
      device::as_host(stream).enqueue([=] { std::copy(result->begin(), result->end(), to.raw()); });
    }

    void meet() {
      std::unique_lock lock(channel_->mutex);
      const std::uint64_t round = channel_->round;
      if (++channel_->arrived == channel_->parts.size()) {
        channel_->arrived = 0;
        ++channel_->round;
        channel_->changed.notify_all();
        return;
      }
      channel_->changed.wait(lock, [&] { return channel_->round != round || channel_->left; });
      if (channel_->round != round) return;
      const std::scoped_lock all(all_.mutex_);
      ++all_.broken_;
      throw Error(ErrorCategory::comm, "another rank has left the channel");
    }

    ThreadChannels& all_;
    std::shared_ptr<Channel> channel_;
    std::uint32_t rank_;
    std::size_t number_;
    std::size_t calls_ = 0;
  };

  std::uint32_t world_;
  Hook before_;
  mutable std::mutex mutex_;
  std::vector<std::size_t> made_;
  std::vector<std::shared_ptr<Channel>> channels_;
  std::size_t broken_ = 0;
};

}  // namespace ballast::test
