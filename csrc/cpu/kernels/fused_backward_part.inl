// The tasks of the fused backward (core/backward_plan.h) in panels and groups of them.

// What one task adds up: what some queries of a key/value head contribute to some keys and the reverse.
struct BackwardPart {
  int64_t head;  // key/value head
  KeyRange keys;
  int64_t first_group, groups;  // of all query heads that share the head
  bool want_query, want_key, want_value;
  bool first, last;  // sums begin here; they are complete afterwards
  bool only_finite;  // elements that are not finite count as zero, and are added where their weight is not
};

template <class Acc>
struct BackwardSplit {
  BackwardPlan plan;
  int64_t head_panels, head_groups;  // of one query head
  int64_t key_blocks, groups;        // of one key/value head

  explicit BackwardSplit(const FusedBackward& p)
      : plan(backward_plan(p)),
        head_panels(PanelSpread::of(p.queries, kLanes<Acc>).panels),
        head_groups(ceil_div(head_panels, kGroupPanels<Acc>)),
        key_blocks(ceil_div(p.keys, kGradKeys)),
        groups(head_groups * p.group) {}

  // Of the wave at hand; the last may have fewer.
  int64_t first_head(const FusedBackward& p) const { return p.wave / plan.ranges * plan.at_once; }
  int64_t tasks(const FusedBackward& p) const {
    return max_of(0, min_of(plan.at_once, plan.heads - first_head(p))) * plan.ranges;
  }

  KeyRange key_range(const FusedBackward& p, int64_t c) const {
    return {key_blocks * c / plan.ranges * kGradKeys, min_of(key_blocks * (c + 1) / plan.ranges * kGradKeys, p.keys)};
  }

  BackwardPart part(const FusedBackward& p, int64_t task) const {
    const int64_t c = task % plan.ranges, t = p.wave % plan.ranges, q = (t - c + plan.ranges) % plan.ranges;
    const int64_t begin = groups * q / plan.ranges, end = groups * (q + 1) / plan.ranges;
    return {first_head(p) + task / plan.ranges,
            key_range(p, c),
            begin,
            end - begin,
            static_cast<bool>(p.grad_query),
            static_cast<bool>(p.grad_key),
            static_cast<bool>(p.grad_value),
            t == 0,
            t == plan.ranges - 1,
            false};
  }

  // "Zero hides": the plain products make NaN of 0 * NaN. Where results of a part are not finite they are worked out
  // once more in one go, with only_finite: the queries of the part with all keys, its keys with all queries.
  BackwardPart only_queries(const FusedBackward& p, BackwardPart part) const {
    part.keys = {0, p.keys};
    part.want_key = part.want_value = false;
    part.first = part.only_finite = true;
    return part;
  }
  BackwardPart only_keys(BackwardPart part) const {
    part.first_group = 0;
    part.groups = groups;
    part.want_query = false;
    part.first = part.only_finite = true;
    return part;
  }
};
