#include "src/comm/channel.h"

#include <exception>
#include <numeric>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/comm/sum.h"

namespace ballast::comm {
namespace {

void check_pages(Bytes bytes) {
  expects(bytes % kPage == 0, "a collective's buffer size is not a multiple of the page size");
}

void check_sum(DeviceBytes scratch, std::uint32_t world) {
  expects(scratch.size() >= world * kPage, "a sum over ranks needs a page of scratch per rank");
}

}  // namespace

Members::Members(std::span<const std::uint32_t> ranks, std::uint32_t rank, std::uint32_t world)
    : ranks_(ranks.begin(), ranks.end()) {
  if (ranks_.empty()) {
    ranks_.resize(world);
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
  std::vector<bool> seen(world, false);
  for (const std::uint32_t member : ranks_) {
    expects(member < world && !seen[member],
            "the members of a channel must be distinct ranks of the run");
    seen[member] = true;
  }
  expects(seen[rank], "a rank must be a member of the channel that it makes");
  by_rank_.resize(ranks_.size());
  std::iota(by_rank_.begin(), by_rank_.end(), 0);
  std::sort(by_rank_.begin(), by_rank_.end(),
            [&](std::uint32_t a, std::uint32_t b) { return ranks_[a] < ranks_[b]; });
  turns_.resize(ranks_.size());
  for (std::uint32_t i = 0; i < by_rank_.size(); ++i) turns_[by_rank_[i]] = i;
  place_ =
      static_cast<std::uint32_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
  all_in_order_ = ranks_.size() == world && std::is_sorted(ranks_.begin(), ranks_.end());
}

Bytes OrderedSum::scratch(std::uint32_t members) const {
  return Bytes{members} * terms * SumParts(elements, members).longest() * size_of(term_type);
}

std::string to_text(const Collective& what) {
  if (what.bytes == 0) return std::string(what.name);
  return fmt::format("{} of {}", what.name, format_bytes(what.bytes));
}

CollectiveTimeout::CollectiveTimeout(const JoinOptions& options)
    : options_(options), exceptions_at_start_(std::uncaught_exceptions()) {}

void CollectiveTimeout::give_up() {
  std::string cause;
  if (const std::exception_ptr failure = std::current_exception()) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      cause = std::string(": ") + error.what();
    } catch (...) {
      // an exception without a message
    }
  }
  const std::scoped_lock lock(mutex_);
  if (!broken_) cause_ = cause;
  broken_ = true;
}

bool CollectiveTimeout::ends_quietly() const {
  return !broken_ && std::uncaught_exceptions() <= exceptions_at_start_;
}

void CollectiveTimeout::check(const Collective& what, double waited_seconds) const {
  if (options_.interrupted != nullptr && *options_.interrupted) {
    throw Error(ErrorCategory::interrupted, "interrupted in " + to_text(what));
  }
  if (broken_) {
    const std::scoped_lock lock(mutex_);
    throw Error(ErrorCategory::comm,
                to_text(what) + ": aborted because another collective failed earlier" + cause_);
  }
  if (waited_seconds > options_.timeout_seconds) {
    throw Error(ErrorCategory::comm,
                fmt::format("{}: not all ranks took part within {}; check the other ranks' logs "
                            "or raise ballast.comm_timeout_seconds",
                            to_text(what), format_seconds(options_.timeout_seconds)));
  }
}

void check_all_gather(ConstDeviceBytes shard, DeviceBytes whole, std::uint32_t world) {
  check_pages(shard.size());
  expects(whole.size() == world * shard.size(), "all_gather: `whole` must hold one shard per rank");
}

void check_reduce_scatter(DeviceBytes whole, DeviceBytes shard, DeviceBytes scratch,
                          std::uint32_t world) {
  check_pages(shard.size());
  expects(whole.size() == world * shard.size(),
          "reduce_scatter: `whole` must hold one shard per rank");
  check_sum(scratch, world);
}

void check_all_reduce(DeviceBytes whole, DeviceBytes scratch, std::uint32_t world) {
  check_pages(whole.size());
  check_sum(scratch, world);
}

void check_all_to_all(ConstDeviceBytes input, std::span<const Bytes> input_parts,
                      DeviceBytes output, std::span<const Bytes> output_parts,
                      std::uint32_t world) {
  const auto fills = [world](std::span<const Bytes> parts, Bytes whole) {
    return parts.size() == world && std::accumulate(parts.begin(), parts.end(), Bytes{0}) <= whole;
  };
  expects(fills(input_parts, input.size()) && fills(output_parts, output.size()),
          "all_to_all: a buffer must hold one part per rank");
}

void check_sum_terms(const OrderedSum& sum, ConstDeviceBytes terms, ConstDeviceBytes first,
                     DeviceBytes out, DeviceBytes scratch, std::uint32_t world) {
  expects(sum.term_type == DType::f32 || sum.term_type == sum.type,
          "sum_terms: terms are in fp32 or in the type of the result");
  expects(terms.size() == sum.bytes_of_terms() && out.size() == sum.bytes() &&
              (first.empty() || first.size() == sum.bytes()),
          "sum_terms: the sizes do not match");
  expects(scratch.size() >= sum.scratch(world), "sum_terms: the scratch memory is too small");
}

void add_own_part(const OrderedSum& sum, std::uint32_t members, std::uint32_t member,
                  ConstDeviceBytes terms, ConstDeviceBytes first, DeviceBytes out,
                  DeviceBytes scratch) {
  const Bytes width = size_of(sum.term_type);
  const SumParts parts(sum.elements, members);
  std::vector<const std::byte*> sources;
  for (std::uint32_t from = 0; from < members; ++from) {
    for (std::uint32_t number = 0; number < sum.terms; ++number) {
      sources.push_back(from == member
                            ? terms.raw() + (number * sum.elements + parts.first(member)) * width
                            : scratch.raw() + parts.received_at(from, number, sum.terms) * width);
    }
  }
  if (sum.descending) std::reverse(sources.begin(), sources.end());
  const Bytes begin = parts.first(member) * size_of(sum.type);
  add_in_order(first.empty() ? nullptr : first.raw() + begin, sources, out.raw() + begin,
               parts.count(member), sum.term_type, sum.type);
}

void check_broadcast(DeviceBytes data, std::uint32_t root, std::uint32_t world) {
  check_pages(data.size());
  expects(root < world, "broadcast: there is no such rank");
}

void check_host_device(const device::Device& device) {
  if (device.kind() == "host") return;
  throw Error(ErrorCategory::comm, "ranks: this program has no communicator for device \"" +
                                       std::string(device.kind()) +
                                       "\"; set ballast.device to \"host\"");
}

}  // namespace ballast::comm
