from shared.engine.request.admission import TRIAL_INTERVAL_S, PrefillRate


def test_the_bound_is_half_of_the_fastest_passes_time():
    rate = PrefillRate()
    assert rate.least_s(100) == 0.0
    for num_tokens, seconds in ((10, 20.0), (10, 5.0), (1, 3.0), (0, 0.001), (100, 80.0)):
        rate.record(num_tokens, seconds)
    assert rate.least_s(100) == 0.5 * 100 * 0.5


def test_one_request_at_a_time_is_tried():
    rate = PrefillRate()
    times_s = (5.0, 6.0, 5.0 + TRIAL_INTERVAL_S, 6.0 + TRIAL_INTERVAL_S, 5.0 + 2 * TRIAL_INTERVAL_S)
    assert [rate.may_refuse(now_s) for now_s in times_s] == [True, True, False, True, False]
